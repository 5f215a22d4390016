"""Progress of long commands: bars in a terminal, lines elsewhere, JSON lines under ``--json``, nothing if quiet.

All of it goes to standard error, so that standard output holds only the result.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import typing
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from midlayer_encoders._types import Progress

Mode = Literal["bars", "lines", "json", "quiet"]

_mode: Mode | None = None  # set by the flags of the running command; None means bars or lines


@contextmanager
def display_mode(mode: Mode | None) -> Iterator[None]:
    """Show progress in this mode."""
    global _mode
    _mode = mode
    try:
        yield
    finally:
        _mode = None


def prints_json() -> bool:
    """Return True if the running command was called with ``--json``."""
    return _mode == "json"


def is_first_process() -> bool:
    """Return True in the first of the processes that torchrun, SLURM or Fabric started for one command."""
    rank = next((name for name in ("RANK", "SLURM_PROCID") if name in os.environ), None)
    names = ["NODE_RANK", "LOCAL_RANK"] if rank is None else [rank]
    return all(os.environ.get(name, "0") == "0" for name in names)


def silence() -> None:
    """Show no progress until the command ends, because another process shows it."""
    global _mode
    _mode = "quiet"


@contextmanager
def show_progress(titles: Mapping[str, str] | None = None) -> Iterator[Progress]:
    """Yield a progress callback that shows each stage that has steps.

    Args:
        titles: titles of the stages by name; by default the name.
    """
    with _display() as display:

        def report(stage: str, done: int, total: int) -> None:
            if total:
                display.report(stage, (titles or {}).get(stage, stage), done, total)

        yield report


@contextmanager
def show_waiting(stage: str, title: str) -> Iterator[None]:
    """Show a stage of unknown length, such as loading a model."""
    with _display() as display:
        display.report(stage, title, 0, None)
        yield


def _display() -> AbstractContextManager[_Display]:
    mode = _mode or ("bars" if sys.stderr.isatty() else "lines")
    return {"bars": _Bars, "lines": _Lines, "json": _JsonLines, "quiet": _Display}[mode]()


class _Display:
    """Shows the steps of stages; this one shows nothing.

    A stage has a name, which programs read and which stays the same in every release, and a title for people.
    """

    def report(self, stage: str, title: str, done: int, total: int | None) -> None:
        """Show that ``done`` of ``total`` steps of a stage are done; ``None`` for an unknown total."""

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Show the final state of the last stage."""


class _Bars(_Display):
    """A bar for each stage in a terminal, with its rate and the remaining time."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        class Rate(progress.ProgressColumn):
            def render(self, task: Any) -> str:
                return "" if not task.speed else f"{_number(task.speed)}/s"

        self._tasks: dict[str, Any] = {}
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            Rate(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
        )

    def report(self, stage: str, title: str, done: int, total: int | None) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(title, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def __enter__(self) -> typing.Self:
        self._bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.__exit__(*error)


@dataclass
class _StageState:
    """The state of a stage, and the time since it began."""

    name: str
    title: str
    done: int = 0
    total: int | None = None
    written: tuple[int, int | None] | None = None
    start: float = field(default_factory=lambda: time.monotonic())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def rate(self) -> float | None:
        return self.done / self.seconds if self.done and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        return (self.total - self.done) / self.rate if self.rate and self.total is not None else None


class _Lines(_Display):
    """A line when a stage begins and ends, and one every ``interval`` seconds, even if nothing is reported."""

    interval = 30.0
    shortest = 1.0
    """Seconds that the last stage must take for a line at its end."""

    def __init__(self) -> None:
        self._stages: dict[str, _StageState] = {}
        self._current: _StageState | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._timer = threading.Thread(target=self._write_regularly, daemon=True)

    def report(self, stage: str, title: str, done: int, total: int | None) -> None:
        with self._lock:
            state = self._stages.setdefault(stage, _StageState(stage, title))
            state.done = done
            state.total = total
            if state is not self._current:
                previous = self._current
                self._current = state
                for changed in (previous, state):  # stages alternate: write only what is new
                    if changed is not None and changed.written != (changed.done, changed.total):
                        self._write(changed)

    def _write_regularly(self) -> None:
        while not self._ended.wait(self.interval):
            with self._lock:
                if self._current is not None:
                    self._write(self._current)

    def _write(self, state: _StageState) -> None:
        state.written = (state.done, state.total)
        print(self.line(state), file=sys.stderr, flush=True)  # noqa: T201

    def line(self, state: _StageState) -> str:
        """Return the line about a stage."""
        elapsed = state.seconds >= 1
        if state.total is None:
            return f"{state.title}: {duration(state.seconds)}" if elapsed else f"{state.title} …"
        words = [f"{state.title}: {state.done:,} of {state.total:,}"]
        if elapsed:
            words.append(duration(state.seconds))
        if elapsed and state.rate:
            words.append(f"{_number(state.rate)} a second")
        if elapsed and state.seconds_left:
            words.append(f"{duration(state.seconds_left)} left")
        return ", ".join(words)

    def __enter__(self) -> typing.Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._timer.join()
        if self._current is not None and self._current.seconds >= self.shortest:
            self._write(self._current)


class _JsonLines(_Lines):
    """The same as JSON lines, every second."""

    interval = 1.0
    shortest = 0.0

    def line(self, state: _StageState) -> str:
        left = state.seconds_left
        values = {
            "stage": state.name,
            "title": state.title,
            "done": state.done,
            "total": state.total,
            "seconds": round(state.seconds, 2),
            "seconds_left": None if left is None else round(left, 1),
        }
        return json.dumps(values)


def duration(seconds: float) -> str:
    """Return a duration in words.

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
