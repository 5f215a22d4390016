"""``midlayer tune``: fine-tune a cut model on pairs, with every layer scored before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli.sweep import STAGES
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError

_TITLES = {"training": "steps trained"} | {
    f"{when}: {stage}": f"{title}, {when}" for when in ("before", "after") for stage, title in STAGES.items()
}


@command("Use it", without=["whiten", "embed_filter"], dtype="float32")
def tune(
    *,
    model: _arguments.Model,
    layer: _arguments.LayerWords,
    pairs: Annotated[Path, Option(help="Anchors and positives, scored pairs, or labeled texts; see docs/tuning.md.")],
    out: Annotated[Path, Option(help="Folder for model, page and frames: new, or that of an interrupted run.")],
    tasks: Annotated[str, Option(help="Tasks scored before and after: names, builtin or paths; or none.")] = "builtin",
    lora: Annotated[int, Option(help="Rank of LoRA adapters, merged at the end; 0 trains all weights.")] = 0,
    epochs: Annotated[float, Option(help="Passes over the pairs.")] = 1.0,
    max_steps: Annotated[int | None, Option(help="Number of steps, instead of epochs.")] = None,
    batch_size: Annotated[int, Option(help="Pairs per step: more pairs mean more in-batch negatives.")] = 32,
    learning_rate: Annotated[float | None, Option(help="Peak; by default 5e-5, or 5e-4 with --lora.")] = None,
    held_out: Annotated[float, Option(help="Fraction of the pairs held out for early stopping; or 0.")] = 0.1,
    patience: Annotated[int, Option(help="Evaluations without a lower held-out loss before stopping.")] = 3,
    checkpoints: Annotated[int, Option(help="Number of evaluations and checkpoints; 0 for none.")] = 10,
    mini_batch: Annotated[int | None, Option(help="Rows in memory at a time, if a batch does not fit.")] = None,
    matryoshka: Annotated[str | None, Option(help="Numbers of leading dimensions to train too: 128,64.")] = None,
    adaptive: Annotated[bool, Option(help="Train earlier layers too (AdaptiveLayerLoss).")] = False,
    seed: _arguments.Seed = 0,
    options: EncoderOptions,
) -> None:
    """Cut a model at a layer, fine-tune it on pairs, and show how every layer changed; a stopped run continues.

    Examples:
        midlayer tune MODEL --layer 17 --pairs pairs.jsonl --out tuned
        midlayer tune MODEL --layer 17 --pairs pairs.csv --lora 16 --out tuned
    """
    from midlayer_encoders import tuning

    settings = tuning.TuneSettings(
        lora=lora or False,
        epochs=epochs,
        max_steps=max_steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        held_out=held_out,
        patience=patience,
        checkpoints=checkpoints,
        mini_batch=mini_batch,
        matryoshka=_parse_sizes(matryoshka),
        adaptive=adaptive,
        seed=seed,
    )
    with _progress.show_progress(_TITLES) as progress:
        result = tuning.tune(
            model,
            _arguments.parse_layer(layer),
            pairs,
            out=out,
            tasks=() if tasks == "none" else tasks.split(","),
            settings=settings,
            progress=progress,
            **options.changed(),
        )
    report = result.folder / "report.html"
    words = result.words()
    folders = {"folder": result.folder, "model": result.model_folder}
    _output.print_result(**folders, report=report, words=words, notes=result.notes)
    for line in (words, *result.notes):
        _output.print_text(line)
    _output.print_report(report)
    _output.print_text("Load it with:")
    _output.print_text(f"  SentenceTransformer({json.dumps(str(result.model_folder), ensure_ascii=False)})", wrap=False)


def _parse_sizes(words: str | None) -> list[int] | None:
    try:
        return None if words is None else [int(word) for word in words.split(",")]
    except ValueError:
        raise OptionError(f"`--matryoshka` must be numbers separated by commas, but got {words!r}.") from None
