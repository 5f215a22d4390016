"""``midlayer cache``: the stores of embeddings on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders.cli._app import app, console, make_table
from midlayer_encoders.cli._progress import json_result, print_result


@app.command()
@json_result
def cache(
    root: Annotated[Path, typer.Argument(help="A folder of embeddings: --store, or embeddings inside --out.")],
    remove: Annotated[list[str] | None, typer.Option(help="Key of a store to remove; repeatable.")] = None,
    unused_days: Annotated[int | None, typer.Option(help="Remove stores not used for so many days.")] = None,
    keep_gb: Annotated[float | None, typer.Option(help="Remove the longest unused until so much is left.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would be removed, and remove nothing.")] = False,
) -> None:
    """List the stores of embeddings in a folder, and remove what is not wanted."""
    from dataclasses import asdict
    from datetime import timedelta

    from midlayer_encoders.errors import OptionError
    from midlayer_encoders.store import list_stores, prune
    from midlayer_encoders.validation import check_number

    if unused_days is not None:
        check_number("--unused-days", unused_days, maximum=100_000)
    if keep_gb is not None:
        check_number("--keep-gb", keep_gb)
    if dry_run and not remove and unused_days is None and keep_gb is None:
        raise OptionError("`--dry-run` must be left out where nothing is to be removed.")
    gone = []
    if remove or unused_days is not None or keep_gb is not None:
        gone = prune(
            root, keys=remove or None, unused_for=None if unused_days is None else timedelta(days=unused_days),
            keep_bytes=None if keep_gb is None else int(keep_gb * 1e9), dry_run=dry_run,
        )  # fmt: skip
        console().print(f"{'Would remove' if dry_run else 'Removed'} {len(gone)} stores.")
    stores = list_stores(root)
    print_result(stores=[asdict(one) for one in stores], removed=[one.key for one in gone], dry_run=dry_run)
    if not stores:
        console().print(f"There is no store of embeddings in {root}.", soft_wrap=True)
        return
    columns = ("key", "model", "texts", "layers", "MB", "last used")
    table = make_table(*columns, left=columns)
    for info in stores:
        cells = (info.key, str(info.description.get("model", "")), str(info.texts), str(len(info.layers)))
        table.add_row(*cells, f"{info.bytes / 1e6:.1f}", f"{info.last_used:%Y-%m-%d %H:%M}")
    console().print(table)
