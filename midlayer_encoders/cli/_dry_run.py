"""Output of ``midlayer sweep --dry-run``: what a sweep would do, in 80 columns or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from typer import Exit

from midlayer_encoders.cli import _output
from midlayer_encoders.cli._progress import duration, show_progress

if TYPE_CHECKING:
    from midlayer_encoders.sweeping import Preview, TaskPreview
    from midlayer_encoders.tasks import TaskOverview

_MIN_SECONDS = 45.0  # below it, starting takes most of the time
_NOT_TIMED = "; imports, starting workers, TF-IDF and BM25 come on top"


def print_preview(model: str, tasks: list[str], **arguments: Any) -> None:
    """Print what a sweep would do, a block for each task and one for the model; exit with 1 if it would fail."""
    from midlayer_encoders import sweeping

    with show_progress({"looking": "tasks read", "timing": "batches and tasks timed"}) as progress:
        preview = sweeping.preview(model, tasks, progress=progress, **arguments)
    _output.print_result(**asdict(preview))
    for task in preview.tasks:
        kind = f"{task.data.type} ({task.data.why})" if task.data is not None else "cannot be used"
        _print_block(f"{task.name}: {kind}", _task_lines(task, preview.max_tokens))
    size = "not measured"
    if preview.layers:
        size = f"{preview.layers} layers of {preview.dim} dimensions on {preview.device}"
    _print_block(f"{preview.model}: {size}", _model_lines(preview))
    if preview.error is not None or any(task.error is not None for task in preview.tasks):
        raise Exit(1)


def _print_block(title: str, lines: Iterator[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in lines:
        style = "bold red" if name in ("leaks", "error") else ""
        table.add_row(Text(f"  {name}"), Text(text, style=style))
    _output.print_text(title, style="bold")
    _output.console().print(table)


def _task_lines(task: TaskPreview, max_tokens: int | None) -> Iterator[tuple[str, str]]:
    if task.error is not None:
        yield "error", task.error
    if task.data is not None:
        yield from _data_lines(task.data)
    if task.tokens:
        text = "median {median:,}, 95 % up to {95 %:,}, longest {longest:,}".format(**task.tokens)
        if max_tokens is not None:
            share = f"{task.truncated:.1%} of the texts are" if task.truncated else "none is"
            text += f"; {share} truncated at {max_tokens:,}"
        yield "tokens", text
    if task.texts:
        yield "to embed", f"{task.texts:,} distinct texts"
    if task.scoring:
        yield "scored", task.scoring


def _data_lines(data: TaskOverview) -> Iterator[tuple[str, str]]:
    yield "rows", ", ".join(f"{name} {count:,}" for name, count in data.rows.items())
    if data.duplicates:
        yield "repeated", ", ".join(f"{count:,} in {name}" for name, count in data.duplicates.items())
    if data.leaks:
        yield "leaks", ", ".join(f"{count:,} {what}" for what, count in data.leaks.items())
    balance = data.balance
    if "labels" in balance:
        rarest = f"the rarest in {balance['rarest, share of rows']:.1%} of the rows"
        commonest = f"the commonest in {balance['commonest, share of rows']:.1%}"
        yield "labels", f"{balance['labels']:,.0f}, {rarest}, {commonest}"
    elif "lowest score" in balance:
        yield "scores", f"{balance['lowest score']:g} to {balance['highest score']:g}"
    elif balance:
        fewest, most, mean = balance.values()
        yield "relevant", f"{fewest:.0f} to {most:.0f} documents per query, {mean:.1f} on average"
    if data.note:
        yield "note", data.note


def _model_lines(preview: Preview) -> Iterator[tuple[str, str]]:
    if preview.error is not None:
        yield "error", preview.error
    if preview.texts:
        yield "texts", f"{preview.texts:,} to embed, each once"
    if preview.seconds:
        yield "time", _time_text(preview)
    if preview.store_bytes:
        yield "store", f"{decimal(preview.store_bytes)} of vectors on disk"
    if preview.missing:
        yield "baselines", " ".join(preview.missing)


def _time_text(preview: Preview) -> str:
    seconds = preview.seconds
    parts = ", ".join(f"{name} {duration(seconds[name])}" for name in ("embedding", "scoring", "other"))
    whole = "under a minute" if seconds["whole"] < _MIN_SECONDS else f"about {duration(seconds['whole'])}"
    batches = f"{preview.timed} batch{'' if preview.timed == 1 else 'es'}"
    untimed = f"; without scoring {', '.join(preview.not_timed)}" if preview.not_timed else ""
    return f"{whole}, an estimate from {batches} of these texts: {parts}{untimed}{_NOT_TIMED}"
