"""``midlayer cache``: list and remove stored embeddings."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from midlayer_encoders.cli import _output
from midlayer_encoders.cli._app import command
from midlayer_encoders.errors import OptionError
from midlayer_encoders.validation import check_number


@command(
    "Keep house",
    "midlayer cache runs/reviews/embeddings",
    "midlayer cache STORE --unused-days 30 --dry-run",
    quiet=False,
)
def cache(
    root: Annotated[Path, Argument(help="Folder of embeddings: a sweep's --store, or embeddings in its --out.")],
    remove: Annotated[list[str] | None, Option(help="Key of a store to remove; repeatable.")] = None,
    unused_days: Annotated[int | None, Option(min=0, help="Remove stores not used for this many days.")] = None,
    keep_gb: Annotated[float | None, Option(help="Remove the least recently used until this many GB remain.")] = None,
    dry_run: Annotated[bool, Option(help="Print what would be removed, and remove nothing.")] = False,
) -> None:
    """List stored embeddings and remove those you do not need."""
    from midlayer_encoders.store import list_stores, prune

    unused_for = None if unused_days is None else timedelta(days=min(unused_days, 100_000))
    keep_bytes = None if keep_gb is None else int(check_number("--keep-gb", keep_gb) * 1e9)
    removed = []
    if remove or unused_for is not None or keep_bytes is not None:
        removed = prune(root, keys=remove or None, unused_for=unused_for, keep_bytes=keep_bytes, dry_run=dry_run)
        _output.print_text(f"{'Would remove' if dry_run else 'Removed'} {len(removed)} stores.")
    elif dry_run:
        raise OptionError("`--dry-run` must be left out if nothing is to be removed.")
    stores = list_stores(root)
    keys = [store.key for store in removed]
    _output.print_result(stores=[asdict(store) for store in stores], removed=keys, dry_run=dry_run)
    if not stores:
        _output.print_text(f"There is no store of embeddings in {root}.", wrap=False)
        return
    columns = ["key", "model", "texts", "layers", "MB", "last used"]
    rows = []
    for store in stores:
        cells = (store.key, str(store.description.get("model", "")), str(store.texts), str(len(store.layers)))
        rows.append([*cells, f"{store.bytes / 1e6:.1f}", f"{store.last_used:%Y-%m-%d %H:%M}"])
    _output.print_table(columns, rows, left=columns)
