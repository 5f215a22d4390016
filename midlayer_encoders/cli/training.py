"""``midlayer tune`` and ``midlayer distill``: train a cut model, with every layer scored before and after."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli.sweep import STAGES
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.extras.settings import DistillSettings, TuneSettings, checked_folder

if TYPE_CHECKING:
    from midlayer_encoders.extras.training import TuneResult

_TITLES = {"training": "steps trained", "teacher": "texts read by the teacher"} | {
    f"{when}: {stage}": f"{title}, {when}" for when in ("teacher", "before", "after") for stage, title in STAGES.items()
}


@dataclass(kw_only=True)
class Training:
    """Flags of every kind of training except its settings."""

    model: _arguments.Model
    layer: _arguments.LayerNumber
    out: Annotated[Path, Option(help="Folder for model, page and frames: new, or of an interrupted run.")]
    data: _arguments.Data
    tasks: Annotated[str, Option(help="Tasks scored before and after: names, builtin or paths; or none.")] = "builtin"

    @property
    def task_names(self) -> Sequence[str]:
        """The tasks as in Python."""
        return () if self.tasks == "none" else self.tasks.split(",")


@command("Use it", dtype="float32")
def tune(
    *,
    training: Training,
    settings: TuneSettings,
    pairs: Annotated[
        Path | None, Option(help="Anchors and positives, scored pairs, or labeled texts; see docs/tuning.md.")
    ] = None,
    texts: Annotated[Path | None, Option(help="With --objective mntp: a text per line, or a column text.")] = None,
    options: EncoderOptions,
) -> None:
    """Cut a model at a layer, fine-tune it, and show how every layer changed; a stopped run continues.

    Examples:
        midlayer tune MODEL --layer 17 --pairs pairs.jsonl --out tuned
        midlayer tune MODEL --layer 17 --pairs pairs.csv --lora 16 --out tuned
    """
    from midlayer_encoders.tasks.training_rows import read_rows, scored_tasks

    checked_folder(training.out)
    rows = read_rows(pairs, texts, training.data.columns(), objective=settings.objective)
    rows.split(settings.held_out, settings.seed)
    scored_tasks(training.task_names, training.data.columns(), rows)
    _arguments.check_model(training.model, options)
    from midlayer_encoders.extras import training as tuning  # imports torch

    _train(tuning.tune, training, pairs, texts=texts, settings=settings, **options.changed())


@command("Use it", dtype="float32")
def distill(
    *,
    training: Training,
    settings: DistillSettings,
    texts: Annotated[Path, Option(help="A text per line, or a table with a column text; no labels are needed.")],
    limit: _arguments.Limit = None,
    teacher: Annotated[str | None, Option(help="Another embedding model; by default MODEL itself, uncut.")] = None,
    teacher_layer: Annotated[
        Any, Option(parser=_arguments.parse_layer, metavar="TEXT", help="Layer of the teacher, as in --layer.")
    ] = "-1",
    teacher_recipe: Annotated[str | None, Option(help="Recipe of the teacher, such as word-echo.")] = None,
    options: EncoderOptions,
) -> None:
    """Cut a model at a layer, and train it from texts alone to return the vectors of the whole model.

    Every layer is scored before and after; a stopped run continues.

    Examples:
        midlayer distill MODEL --layer 12 --texts texts.txt --out small
        midlayer distill LM --layer -1 --texts t.txt --teacher-recipe echo --out e
    """
    from midlayer_encoders.tasks.training_rows import read_training_texts, scored_tasks

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
