"""``midlayer compare``: what sets other models apart from a base, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midlayer_encoders.cli._app import (
    FieldName,
    LayersText,
    Limit,
    MetricNames,
    Seed,
    TextsFile,
    Views,
    app,
    console,
    first_of,
    parse_layers,
    parse_names,
    print_by_layer,
    print_report,
    quieten,
    read_own,
    results_folder,
)
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import long_running, print_result, shown
from midlayer_encoders.encoder.options import EncoderOptions

if TYPE_CHECKING:
    from midlayer_encoders.comparing import CompareResult

_MODEL = "Folder, name on the hub, name@revision, or built-in"


@app.command()
@long_running
@model_options(without=["revision"], norm="none")  # each model has its own: name@revision
def compare(
    *,
    base: Annotated[str, typer.Argument(help=f"{_MODEL}.")],
    tuned: Annotated[list[str], typer.Argument(help=f"One or more to compare with it. {_MODEL}.")],
    texts: TextsFile,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for frames, figures and page.", show_default="midlayer-results/compare-BASE-TUNED"),
    ] = None,
    names: MetricNames = "paper",
    layers: LayersText = "all",
    field: FieldName = None,
    limit: Limit = None,
    views: Views = 16,
    resamples: Annotated[int, typer.Option(help="Random halves of the texts, for the intervals.")] = 50,
    seed: Seed = 0,
    options: EncoderOptions,
) -> None:
    """Compare models with a base: metrics side by side, differences with intervals, CKA between their layers."""
    quieten()
    from midlayer_encoders.comparing import compare as run
    from midlayer_encoders.comparing.text_metrics import comparable

    out = out or results_folder("compare", base, *tuned)
    wanted = comparable(parse_names(names))
    lines = first_of(read_own(texts, field=field), limit)
    with shown() as progress:
        result = run(
            base, *tuned, texts=lines, metrics=wanted, layers=parse_layers(layers), views=views, seed=seed,
            resamples=resamples, dataset=texts.stem, out=out, **options.changed() | {"norm": options.norm},
            progress=progress,
        )  # fmt: skip
    print_result(
        folder=out, report=out / "report.html", words=[*result.words(), *result.notes],
        differences=result.differences.to_dicts(),
    )  # fmt: skip
    _print_differences(result)
    for note in (*result.words(), *result.notes):
        console().print(note, highlight=False, markup=False)
    print_report(out / "report.html")


def _print_differences(result: CompareResult) -> None:
    """Print each model minus the base by layer; those whose interval holds zero are dim."""
    for (base, model), rows in result.differences.group_by("base", "model", maintain_order=True):
        cells = {(row["layer"], row["name"]): _word(row) for row in rows.iter_rows(named=True)}
        print_by_layer(cells, title=f"{model} minus {base} (dim: the interval holds zero)")


def _word(row: Mapping[str, float]) -> str:
    text = f"{row['difference']:+.3g}" if row["difference"] else "0"
    return text if row["low"] > 0 or row["high"] < 0 else f"[dim]{text}[/]"
