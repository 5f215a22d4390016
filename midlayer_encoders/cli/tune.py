"""``midlayer tune``: a model cut at a layer and tuned on pairs, with every layer scored before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders.cli._app import LayerText, Model, Seed, app, console, parse_layer, print_report, quieten
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import long_running, print_result, shown
from midlayer_encoders.cli.sweep import STAGES
from midlayer_encoders.encoder.options import EncoderOptions

_TITLES = {"training": "steps trained"} | {
    f"{when}: {stage}": f"{title}, {when}" for when in ("before", "after") for stage, title in STAGES.items()
}


@app.command()
@long_running
@model_options(without=["whiten", "embed_filter"], dtype="float32")
def tune(
    *,
    model: Model,
    layer: LayerText,
    pairs: Annotated[
        Path,
        typer.Option(
            help="JSONL, CSV, TSV or parquet: anchor and positive, with hard negatives in negative, negative_2 …; "
            "sentence1, sentence2 and score; or text and label."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for model, page and frames: new, or that of a run to go on.")],
    tasks: Annotated[
        str, typer.Option(help="Scored before and after: names, builtin, or paths, with commas; none for no scores.")
    ] = "builtin",
    lora: Annotated[int, typer.Option(help="Rank of LoRA adapters, merged at the end; 0 trains all weights.")] = 0,
    epochs: Annotated[float, typer.Option(help="Passes over the pairs.")] = 1.0,
    max_steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    batch_size: Annotated[int, typer.Option(help="Pairs a step: more are more in-batch negatives.")] = 32,
    learning_rate: Annotated[
        float | None, typer.Option(help="At its peak; 5e-5, or 5e-4 with --lora, by default.")
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of the pairs to stop early by; 0 for none.")] = 0.1,
    patience: Annotated[int, typer.Option(help="Evaluations without a lower held-out loss before it stops.")] = 3,
    checkpoints: Annotated[int, typer.Option(help="Evaluations and checkpoints over the run; 0 for none.")] = 10,
    mini_batch: Annotated[
        int | None, typer.Option(help="Rows in memory at a time, where a batch does not fit.")
    ] = None,
    matryoshka: Annotated[
        str | None, typer.Option(help="Leading dimensions to train beside all of them, with commas: 128,64.")
    ] = None,
    adaptive: Annotated[bool, typer.Option(help="Train earlier layers too (AdaptiveLayerLoss).")] = False,
    seed: Seed = 0,
    options: EncoderOptions,
) -> None:
    """Cut a model at a layer, tune it on pairs, and show what changed at every layer; a stopped run goes on."""
    quieten()
    from midlayer_encoders.tuning import tune as run

    with shown(_TITLES) as progress:
        result = run(
            model, parse_layer(layer), pairs, out=out, tasks=() if tasks == "none" else tasks.split(","),
            lora=lora or False, epochs=epochs, max_steps=max_steps, batch_size=batch_size, learning_rate=learning_rate,
            held_out=held_out, patience=patience, checkpoints=checkpoints, mini_batch=mini_batch,
            matryoshka=_sizes(matryoshka), adaptive=adaptive, seed=seed, progress=progress, **options.changed(),
        )  # fmt: skip
    print_result(
        folder=result.folder, model=result.model_folder, report=result.folder / "report.html", words=result.words(),
        notes=result.notes,
    )  # fmt: skip
    for line in (result.words(), *result.notes):
        console().print(line, highlight=False, markup=False)
    print_report(result.folder / "report.html")
    console().print("Load it with:")
    console().print(f'  SentenceTransformer("{result.model_folder}")', highlight=False, markup=False, soft_wrap=True)


def _sizes(words: str | None) -> list[int] | None:
    if words is None:
        return None
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise typer.BadParameter(f"must be numbers with commas, but got {words!r}", param_hint="--matryoshka") from None
