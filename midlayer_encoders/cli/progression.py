"""``midlayer progression``: every layer of a model at every step of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders.cli import _arguments, _output
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli._progress import show_progress
from midlayer_encoders.encoder.options import EncoderOptions


@command(
    "Look inside",
    "midlayer progression checkpoints/ --texts texts.txt --out runs/steps",
    "midlayer progression MODEL --revisions step1,step512 --texts t.txt --out r",
    without=["revision"],  # --revisions names them
    norm="none",
)
def progression(
    *,
    model: Annotated[str, typer.Argument(help="Hub name, or a folder of checkpoint-500, step500, …")],
    texts: _arguments.TextsFile,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for frame, figures and page; an interrupted run continues there.",
            show_default="midlayer-results/progression-MODEL",
        ),
    ] = None,
    revisions: Annotated[
        str | None, typer.Option(help="step1,step512,…: on the hub, or subfolders of MODEL (all by default).")
    ] = None,
    metrics: _arguments.MetricNames = "paper",
    layers: _arguments.LayersWords = "all",
    field: _arguments.FieldName = None,
    limit: _arguments.Limit = None,
    views: _arguments.Views = 16,
    seed: _arguments.Seed = 0,
    options: EncoderOptions,
) -> None:
    """Measure every layer at every step of a model's training, and show which layers settle first."""
    _arguments.silence_libraries()
    from midlayer_encoders.comparing import progression as measure_progression

    out = out or _arguments.results_folder("progression", model)
    with show_progress() as progress:
        result = measure_progression(
            model,
            [name.strip() for name in revisions.split(",")] if revisions else None,
            metrics=_arguments.parse_metrics(metrics),
            texts=_arguments.take_first(_arguments.read_texts(texts, field=field), limit),
            layers=_arguments.parse_layers(layers),
            views=views,
            seed=seed,
            dataset=texts.stem,
            out=out,
            progress=progress,
            **options.changed() | {"norm": options.norm},
        )
    report = out / "report.html"
    settled = result.settled()
    _output.print_result(
        folder=out, report=report, words=result.words(), failures=result.failures, settled=settled.to_dicts()
    )
    steps = settled.select("layer", "name", "step").iter_rows()
    cells = {(layer, name): "" if step is None else str(step) for layer, name, step in steps}
    _output.print_by_layer(cells, title="settled within 10 % of the metric's range from step")
    _output.print_text(" ".join(result.words()))
    _output.print_failures(result.failures)
    _output.print_report(report)
    if result.failures:
        raise typer.Exit(1)
