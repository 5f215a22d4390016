"""``midlayer tune`` and ``midlayer distill``: train a cut model, with every layer scored before and after."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli.sweep import STAGES
from midlayer_encoders.encoder.options import EncoderOptions

if TYPE_CHECKING:
    from midlayer_encoders.extras.training import TuneResult

_TITLES = {"training": "steps trained", "teacher": "texts read by the teacher"} | {
    f"{when}: {stage}": f"{title}, {when}" for when in ("teacher", "before", "after") for stage, title in STAGES.items()
}


@dataclass(kw_only=True)
class Training:
    """Flags of every kind of training, with the defaults of ``tune``."""

    model: _arguments.Model
    layer: _arguments.LayerNumber
    out: Annotated[Path, Option(help="Folder for model, page and frames: new, or of an interrupted run.")]
    data: _arguments.Data
    tasks: Annotated[str, Option(help="Tasks scored before and after: names, builtin or paths; or none.")] = "builtin"
    lora: Annotated[int, Option(help="Rank of LoRA adapters, merged at the end; 0 trains all weights.")] = 0
    epochs: Annotated[float, Option(help="Passes over the training data.")] = 1.0
    max_steps: Annotated[int | None, Option(help="Number of steps, instead of epochs.")] = None
    batch_size: Annotated[int, Option(help="Pairs per step: more pairs mean more in-batch negatives.")] = 32
    learning_rate: Annotated[float | None, Option(help="Peak; by default 5e-5, or 5e-4 with --lora.")] = None
    held_out: Annotated[float, Option(help="Fraction of the rows held out for early stopping; or 0.")] = 0.1
    patience: Annotated[int, Option(help="Evaluations without a lower held-out loss before stopping.")] = 3
    checkpoints: Annotated[int, Option(help="Number of evaluations and checkpoints; 0 for none.")] = 10
    seed: _arguments.Seed = 0

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks as in Python."""
        return () if self.tasks == "none" else self.tasks.split(",")

    def settings(self) -> dict[str, Any]:
        """Return the fields of the settings in Python."""
        from midlayer_encoders.arguments import TrainingSettings

        values = {each.name: getattr(self, each.name) for each in fields(TrainingSettings)}
        return values | {"lora": self.lora or False}


@dataclass(kw_only=True)
class Distilling(Training):
    """The same with the defaults of ``distill``."""

    epochs: Annotated[float, Option(help="Passes over the training data.")] = 10.0
    batch_size: Annotated[int, Option(help="Texts per step.")] = 128
    learning_rate: Annotated[float | None, Option(help="Peak; by default 2e-4, or 1e-3 with --lora.")] = None
    held_out: Annotated[float, Option(help="Fraction of the texts held out for early stopping; or 0.")] = 0.02


@command("Use it", dtype="float32")
def tune(
    *,
    training: Training,
    pairs: Annotated[
        Path | None, Option(help="Anchors and positives, scored pairs, or labeled texts; see docs/tuning.md.")
    ] = None,
    texts: Annotated[Path | None, Option(help="With --objective mntp: a text per line, or a column text.")] = None,
    objective: Annotated[str, Option(help="pairs, or mntp: predict masked tokens of --texts.")] = "pairs",
    mini_batch: Annotated[int | None, Option(help="Rows in memory at a time, if a batch does not fit.")] = None,
    matryoshka: Annotated[str | None, Option(help="Numbers of leading dimensions to train too: 128,64.")] = None,
    options: EncoderOptions,
) -> None:
    """Cut a model at a layer, fine-tune it, and show how every layer changed; a stopped run continues.

    Examples:
        midlayer tune MODEL --layer 17 --pairs pairs.jsonl --out tuned
        midlayer tune MODEL --layer 17 --pairs pairs.csv --lora 16 --out tuned
    """
    from midlayer_encoders.arguments import TuneSettings, checked_folder
    from midlayer_encoders.tasks.training_rows import read_rows, scored_tasks

    settings = TuneSettings(
        mini_batch=mini_batch,
        matryoshka=_arguments.parse_sizes("matryoshka", matryoshka) or None,
        objective=objective,  # type: ignore[arg-type]  # checked there
        **training.settings(),
    )
    checked_folder(training.out)
    rows = read_rows(pairs, texts, training.data.columns(), objective=objective)
    rows.split(settings.held_out, settings.seed)
    scored_tasks(training.task_names, training.data.columns(), rows)
    _arguments.check_model(training.model, options)
    from midlayer_encoders.extras import training as tuning  # imports torch

    _train(tuning.tune, training, pairs, texts=texts, settings=settings, **options.changed())


@command("Use it", dtype="float32")
def distill(
    *,
    training: Distilling,
    texts: Annotated[Path, Option(help="A text per line, or a table with a column text; no labels are needed.")],
    limit: _arguments.Limit = None,
    teacher: Annotated[str | None, Option(help="Another embedding model; by default MODEL itself, uncut.")] = None,
    teacher_layer: Annotated[
        Any, Option(parser=_arguments.parse_layer, metavar="TEXT", help="Layer of the teacher, as in --layer.")
    ] = "-1",
    teacher_recipe: Annotated[str | None, Option(help="Recipe of the teacher, such as word-echo.")] = None,
    match: Annotated[
        str, Option(help="What to learn: vectors, centered (minus their mean), similarities (other widths) or both.")
    ] = "vectors",
    options: EncoderOptions,
) -> None:
    """Cut a model at a layer, and train it from texts alone to return the vectors of the whole model.

    Every layer is scored before and after; a stopped run continues.

    Examples:
        midlayer distill MODEL --layer 12 --texts texts.txt --out small
        midlayer distill LM --layer -1 --texts t.txt --teacher-recipe echo --out e
    """
    from midlayer_encoders.arguments import DistillSettings, checked_folder
    from midlayer_encoders.tasks.training_rows import read_training_texts, scored_tasks

    settings = DistillSettings(match=match, **training.settings())  # type: ignore[arg-type]  # checked there
    checked_folder(training.out)
    rows = read_training_texts(texts, training.data.columns(), limit)
    rows.split(settings.held_out, settings.seed)
    scored_tasks(training.task_names, training.data.columns(), rows)
    _arguments.check_model(training.model, options)
    from midlayer_encoders.extras import training as tuning  # imports torch

    _train(
        tuning.distill,
        training,
        texts,
        limit=limit,
        teacher=teacher,
        teacher_layer=teacher_layer,
        teacher_recipe=teacher_recipe,
        settings=settings,
        **options.changed(),
    )


def _train(function: Callable[..., TuneResult], flags: Training, data: Path | None, **arguments: Any) -> None:
    """Train a model with progress, and print its scores and the line that loads it."""
    with _progress.show_progress(_TITLES) as progress:
        result = function(
            flags.model,
            flags.layer,
            data,
            out=flags.out,
            **asdict(flags.data),
            tasks=flags.task_names,
            progress=progress,
            **arguments,
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
