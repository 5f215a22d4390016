"""``midlayer progression``: every layer of a model at every step of its training."""

from __future__ import annotations

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
    from midlayer_encoders.comparing import ProgressionResult


@app.command()
@long_running
@model_options(without=["revision"], norm="none")  # --revisions names them
def progression(
    *,
    model: Annotated[str, typer.Argument(help="Name on the hub, or a folder of checkpoint-500, step500, …")],
    texts: TextsFile,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for frame, figures and page; a killed run goes on there.",
            show_default="midlayer-results/progression-MODEL",
        ),
    ] = None,
    revisions: Annotated[
        str | None, typer.Option(help="step1,step512,…: on the hub, or sub-folders of MODEL (all by default).")
    ] = None,
    names: MetricNames = "paper",
    layers: LayersText = "all",
    field: FieldName = None,
    limit: Limit = None,
    views: Views = 16,
    seed: Seed = 0,
    options: EncoderOptions,
) -> None:
    """Measure every layer at every step of a model's training: which layers settle first?"""
    quieten()
    from midlayer_encoders.comparing import progression as run

    out = out or results_folder("progression", model)
    wanted = parse_names(names)
    asked = [name.strip() for name in revisions.split(",")] if revisions else None
    lines = first_of(read_own(texts, field=field), limit)
    with shown() as progress:
        result = run(
            model, asked, texts=lines, metrics=wanted, layers=parse_layers(layers), views=views, seed=seed,
            dataset=texts.stem, out=out, **options.changed() | {"norm": options.norm},
            progress=progress,
        )  # fmt: skip
    print_result(
        folder=out, report=out / "report.html", words=result.words(), failures=result.failures,
        settled=result.settled().to_dicts(),
    )  # fmt: skip
    _print_settled(result)
    for name, error in result.failures.items():
        console().print(f"{name} failed, {error}", style="bold red", highlight=False, markup=False)
    print_report(out / "report.html")
    if result.failures:
        raise typer.Exit(1)


def _print_settled(result: ProgressionResult) -> None:
    """Print from which step on each layer stays near where it ends, and the finding in words."""
    ends = result.settled().select("layer", "name", "step")
    cells = {(layer, name): "" if step is None else str(step) for layer, name, step in ends.iter_rows()}
    print_by_layer(cells, title="settled within 10 % of the metric's range from step")
    console().print(" ".join(result.words()), highlight=False)
