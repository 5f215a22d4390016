"""What ``midlayer sweep --dry-run`` prints: what a sweep would do, in 80 columns or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from midlayer_encoders.cli._app import console
from midlayer_encoders.cli._progress import duration, print_result

if TYPE_CHECKING:
    from midlayer_encoders.sweeping import Preview, TaskPreview
    from midlayer_encoders.tasks import TaskOverview

__all__ = ["print_preview"]

_LEAST = 45.0  # seconds: of less, starting is the most
_NOT_TIMED = "; imports, starting workers, TF-IDF and BM25 come on top"


def print_preview(found: Preview) -> None:
    """Print what a sweep would do: a block for each task and one for the model."""
    print_result(**asdict(found))
    for task in found.tasks:
        about = f"{task.data.type} ({task.data.why})" if task.data is not None else "cannot be used"
        _print_block(f"{task.name}: {about}", dict(_task_lines(task, found.max_tokens)))
    size = f"{found.layers} layers of {found.dim} dimensions on {found.device}" if found.layers else "not measured"
    _print_block(f"{found.model}: {size}", dict(_model_lines(found)))


def _print_block(title: str, lines: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for name, words in lines.items():
        style = "bold red" if name in ("leaks", "error") else ""
        table.add_row(Text(f"  {name}"), Text(words, style=style))
    console().print(title, style="bold", highlight=False, markup=False)
    console().print(table)


def _task_lines(task: TaskPreview, max_tokens: int | None) -> Iterator[tuple[str, str]]:
    if task.error is not None:
        yield "error", task.error
    if task.data is not None:
        yield from _data_lines(task.data)
    if task.tokens:
        words = "median {median:,}, 95 % up to {95 %:,}, longest {longest:,}".format(**task.tokens)
        if max_tokens is not None:
            share = f"{task.truncated:.1%} of the texts are" if task.truncated else "none is"
            words += f"; {share} truncated at {max_tokens:,}"
        yield "tokens", words
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
    known = data.balance
    if "labels" in known:
        rarest, commonest = known["rarest, share of rows"], known["commonest, share of rows"]
        words = f"{known['labels']:,.0f}, the rarest in {rarest:.1%} of the rows, the commonest in {commonest:.1%}"
        yield "labels", words
    elif "lowest score" in known:
        yield "scores", f"{known['lowest score']:g} to {known['highest score']:g}"
    elif known:
        fewest, most, mean = known.values()
        yield "relevant", f"{fewest:.0f} to {most:.0f} documents of a query, {mean:.1f} on average"
    if data.note:
        yield "note", data.note


def _model_lines(found: Preview) -> Iterator[tuple[str, str]]:
    from rich.filesize import decimal

    if found.error is not None:
        yield "error", found.error
    if found.texts:
        yield "texts", f"{found.texts:,} to embed, each once"
    if found.seconds:
        yield "time", _time_words(found)
    if found.store_bytes:
        yield "store", f"{decimal(found.store_bytes)} of vectors on disk"
    if found.missing:
        yield "baselines", " ".join(found.missing)


def _time_words(found: Preview) -> str:
    known = found.seconds
    parts = ", ".join(f"{name} {duration(known[name])}" for name in ("embedding", "scoring", "other"))
    whole = "under a minute" if known["whole"] < _LEAST else f"about {duration(known['whole'])}"
    batches = f"{found.timed} batch{'' if found.timed == 1 else 'es'}"
    left_out = f"; without scoring {', '.join(found.not_timed)}" if found.not_timed else ""
    return f"{whole}, an estimate from {batches} of these texts: {parts}{left_out}{_NOT_TIMED}"
