"""Progress of long commands: bars in a terminal, lines elsewhere, nothing if quiet.

All of it goes to standard error, so that standard output holds only the result.
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Literal, Self

from rich import progress
from rich.console import Console
from rich.text import Text

from midlayer_encoders._types import Progress

Mode = Literal["bars", "lines", "json", "quiet"]
_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_OF_RATE = 5.0  # a rate is stable after these, if both halves of the time had about the same one
_STABLE_RATIO = 1.5
_UNEVEN = ("planning",)  # the first of several tasks may embed the texts of all: a rate would mislead

_display: "_Display | None" = None  # of the running command
_mode: Mode | None = None  # set by the flags of the running command; None and json mean bars or lines


@contextmanager
def display_mode(mode: Mode | None) -> Iterator[None]:
    """Show the progress of a command in this mode."""
    global _mode
    _mode = mode
    try:
        yield
    finally:
        _mode = None


def prints_json() -> bool:
    """Return True if the running command was called with ``--json``."""
    return _mode == "json"


@contextmanager
def show_progress(titles: Mapping[str, str] | None = None) -> Iterator[Progress]:
    """Yield a progress callback that shows each stage that has steps.

    Args:
        titles: titles of the stages by name; by default the name.
    """
    global _display
    with _Display() as display:
        _display = display

        def report(stage: str, done: int, total: int) -> None:
            if total:
                display.report(stage, (titles or {}).get(stage, stage), done, total)

        try:
            yield report
        finally:
            _display = None


@contextmanager
def show_waiting(stage: str, title: str) -> Iterator[None]:
    """Show a stage of unknown length, such as loading a model, in the open display if there is one."""
    with nullcontext(_display) if _display else _Display() as display:
        display.report(stage, title, 0, None)
        yield


class _Rate(progress.ProgressColumn):
    def render(self, task: progress.Task) -> Text:
        return Text(f"{_number(task.speed)}/s" if task.speed else "")


class _TimeLeft(progress.ProgressColumn):
    def render(self, task: progress.Task) -> Text:
        left = _seconds_left(task, task.elapsed or 0.0)
        return Text("" if left is None else f"{duration(left)} left")


class _Display:
    """Shows stages as bars, or as lines: one at intervals, and one of each stage at the end."""

    def __init__(self) -> None:
        self._mode = _mode if _mode not in (None, "json") else "bars" if sys.stderr.isatty() else "lines"
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            _Rate(),
            progress.TimeElapsedColumn(),
            _TimeLeft(),
        )
        hidden = self._mode != "bars"
        self._bars = progress.Progress(*columns, console=Console(stderr=True), get_time=time.monotonic, disable=hidden)
        self._tasks: dict[str, progress.Task] = {}
        self._current: progress.Task | None = None
        self._ended = threading.Event()
        self._timer = threading.Thread(target=self._write_regularly, daemon=True)

    def __enter__(self) -> Self:
        self._bars.start()
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
        self._ended.set()
        self._timer.join()
        for task in self._tasks.values():
            if task.fields["written"] != (task.completed, task.total) and task.fields["seconds"] >= 1:
                self._write(task, task.fields["seconds"])

    def report(self, stage: str, title: str, done: int, total: int | None) -> None:
        """Show that ``done`` of ``total`` steps of a stage are done; ``None`` for an unknown total."""
        if stage not in self._tasks:
            number = self._bars.add_task(title, total=total, stage=stage, written=None, seconds=0.0, history=[])
            self._tasks[stage] = self._bars.tasks[number]
        task = self._tasks[stage]
        seconds, history = task.elapsed or 0.0, task.fields["history"]
        self._bars.update(task.id, completed=done, total=total, seconds=seconds)
        if not history or seconds > 1.05 * history[-1][0]:  # few are enough to find half of the time
            history.append((seconds, done))
        if task is not self._current:
            self._current = task
            if total is None:
                self._write(task)

    def _write_regularly(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LINES):
            task = self._current
            if task is not None and (not task.finished or task.fields["written"] != (task.completed, task.total)):
                self._write(task)

    def _write(self, task: progress.Task, seconds: float | None = None) -> None:
        """Write a line for a stage that took this long, by default until now."""
        task.fields["written"] = (task.completed, task.total)
        seconds = task.elapsed or 0.0 if seconds is None else seconds
        if self._mode == "lines":
            sys.stderr.write(_line(task, seconds))
            sys.stderr.flush()


def _line(task: progress.Task, seconds: float) -> str:
    if task.total is None:
        return f"{task.description}: {duration(seconds)}\n" if seconds >= 1 else f"{task.description} …\n"
    parts = [f"{task.description}: {task.completed:,} of {task.total:,}"]
    if seconds >= 1:
        parts.append(duration(seconds))
        if task.completed and task.fields["stage"] not in _UNEVEN:
            rate = task.completed / seconds
            parts.append(f"{_number(rate)} per second")
            left = _seconds_left(task, seconds)
            parts += [] if left is None else [f"{duration(left)} left"]
    return ", ".join(parts) + "\n"


def _seconds_left(task: progress.Task, seconds: float) -> float | None:
    """Return the remaining time of a stage after some seconds; ``None`` at its end, or while its rate is not stable."""
    if task.total is None or task.completed >= task.total or seconds < _SECONDS_OF_RATE:
        return None
    half, done = max((report for report in task.fields["history"] if report[0] <= seconds / 2), default=(0.0, 0))
    if not half or not 0 < done < task.completed or task.fields["stage"] in _UNEVEN:
        return None
    first, second = done / half, (task.completed - done) / (seconds - half)
    return (task.total - task.completed) / second if max(first, second) <= _STABLE_RATIO * min(first, second) else None


def duration(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> duration(7.4), duration(200), duration(7300)
        ('7 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
