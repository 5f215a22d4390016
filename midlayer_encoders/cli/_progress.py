"""Progress of long commands on standard error: bars in a terminal, lines elsewhere, nothing if quiet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Literal

from rich import progress
from rich.console import Console

from midlayer_encoders._types import Progress

_SECONDS_BETWEEN_LINES = 30.0

_display: _Display | None = None  # of the running command
_mode: Literal["json", "quiet"] | None = None  # the flag of the running command


@contextmanager
def output_mode(mode: Literal["json", "quiet"] | None) -> Iterator[None]:
    """Run a command in this mode."""
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
    with _Display() as _display:

        def report(stage: str, done: int, total: int) -> None:
            if total and _display is not None:
                _display.report((titles or {}).get(stage, stage), done, total)

        try:
            yield report
        finally:
            _display = None


@contextmanager
def show_waiting(title: str) -> Iterator[None]:
    """Show a stage of unknown length, such as loading a model, in the open display if there is one."""
    with nullcontext(_display) if _display else _Display() as display:
        display.report(title, 0, None)
        yield


class _Display(progress.Progress):
    """Bars in a terminal; elsewhere a line for each wait, one for each stage at its end, and others at intervals."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._writes_lines = _mode != "quiet" and not console.is_terminal
        super().__init__(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            speed_estimate_period=600,
            get_time=time.monotonic,
            disable=_mode == "quiet" or self._writes_lines,
        )
        self._stages: dict[str, progress.Task] = {}
        self._current: progress.Task | None = None
        self._ended = threading.Event()
        self._timer = threading.Thread(target=self._write_regularly, daemon=True)

    def start(self) -> None:
        """Start the bars, and the thread that writes lines."""
        super().start()
        self._timer.start()

    def stop(self) -> None:
        """Stop the bars and the thread, and write the last line of each stage that took a second."""
        super().stop()
        self._ended.set()
        self._timer.join()
        for task in self._stages.values():
            if _seconds(task) >= 1:
                self._write(task)

    def report(self, title: str, done: int, total: int | None) -> None:
        """Show that ``done`` of ``total`` steps of a stage are done; ``None`` for an unknown total."""
        if title not in self._stages:
            task_id = self.add_task(title, total=total)
            self._stages[title] = next(task for task in self.tasks if task.id == task_id)
            if total is None:
                self._write(self._stages[title])
        self._current = self._stages[title]
        self.update(self._current.id, completed=done, total=total)

    def _write_regularly(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LINES):
            if self._current is not None and not self._current.finished:
                self._write(self._current)

    def _write(self, task: progress.Task) -> None:
        steps = " …" if task.total is None else f": {task.completed:,} of {task.total:,}"
        parts = [f"{task.description}{steps}"]
        parts += [str(timedelta(seconds=round(_seconds(task))))] if _seconds(task) >= 1 else []
        parts += [f"{timedelta(seconds=task.time_remaining)} left"] if task.time_remaining else []
        if self._writes_lines:
            self.console.out(", ".join(parts), highlight=False)


def _seconds(task: progress.Task) -> float:
    return task.finished_time or task.elapsed or 0.0
