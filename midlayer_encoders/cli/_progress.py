"""Where long work stands: bars in a terminal, lines elsewhere, JSON for machines, nothing where none is wanted.

All of it goes to the error output, so that what a command prints can be kept by itself. Under ``--json`` that is one
JSON object, and the words for people are left out.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import typer

from midlayer_encoders._types import Progress

__all__ = [
    "duration", "first_process", "json_asked", "json_result", "long_running", "print_result", "shown", "silence",
    "waiting",
]  # fmt: skip

Kind = Literal["bars", "lines", "json", "quiet"]
BEAT = 30.0  # seconds between two lines of one stage
JSON_BEAT = 1.0

_QUIET = ("--quiet", "Show no progress.")
_JSON = ("--json", "Print the result as one JSON object.")
_JSON_LINES = ("--json", "Print the result as one JSON object, and progress as JSON lines on the error output.")

_asked: Kind | None = None  # by the flags of the command that runs

_Command = TypeVar("_Command", bound=Callable[..., Any])


def long_running(command: _Command) -> _Command:
    """Give a command the flags ``--quiet`` and ``--json``, which say how its progress and its result are shown."""
    return _with_flags(command, quiet=_QUIET, json_lines=_JSON_LINES)


def json_result(command: _Command) -> _Command:
    """Give a command that is done at once the flag ``--json``."""
    return _with_flags(command, json_lines=_JSON)


def _with_flags(command: _Command, **flags: tuple[str, str]) -> _Command:
    hints = typing.get_type_hints(command, include_extras=True)
    own = [one.replace(annotation=hints[one.name]) for one in inspect.signature(command).parameters.values()]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False,
            annotation=Annotated[bool, typer.Option(flag, help=told, rich_help_panel="Output")],
        )
        for name, (flag, told) in flags.items()
    ]  # fmt: skip

    @functools.wraps(command)
    def run(*, json_lines: bool, quiet: bool = False, **given: Any) -> Any:
        global _asked
        if quiet and json_lines:
            raise typer.BadParameter("give one of --quiet and --json")
        _asked = "quiet" if quiet else "json" if json_lines else None
        try:
            return command(**given)
        finally:
            _asked = None

    parameters = [*(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own), *added]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run  # type: ignore[return-value]


def json_asked() -> bool:
    """Return whether the command that runs was called with ``--json``."""
    return _asked == "json"


def print_result(**found: Any) -> None:
    """Print what a command found as one JSON object, where ``--json`` asks for it; NaN and infinity are ``null``."""
    if json_asked():
        print(json.dumps(_plain(found), ensure_ascii=False, allow_nan=False), flush=True)  # noqa: T201


def _plain(value: Any) -> Any:
    """Return a value as JSON has it.

    Example:
        >>> _plain({1: (float("nan"), 2.5)})
        {'1': [None, 2.5]}
    """
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def first_process() -> bool:
    """Return whether this is the first of the processes that torchrun, SLURM or Fabric started for one command."""
    known = next((name for name in ("RANK", "SLURM_PROCID") if name in os.environ), None)
    return all(os.environ.get(name, "0") == "0" for name in ([known] if known else ["NODE_RANK", "LOCAL_RANK"]))


def silence() -> None:
    """Show no progress until the command ends: another process of it does."""
    global _asked
    _asked = "quiet"


@contextmanager
def shown(titles: Mapping[str, str] | None = None) -> Iterator[Progress]:
    """Give a progress callback that shows each stage once there is something to do.

    Args:
        titles: of the stages, by name; a stage without one is its own title.
    """
    with _display() as display:

        def report(stage: str, done: int, total: int) -> None:
            if total:
                display.report(stage, (titles or {}).get(stage, stage), done, total)

        yield report


@contextmanager
def waiting(stage: str, title: str) -> Iterator[None]:
    """Show that something is being done whose end is not known, as loading a model."""
    with _display() as display:
        display.report(stage, title, 0, None)
        yield


def _display() -> AbstractContextManager[_Display]:
    kind = _asked or ("bars" if sys.stderr.isatty() else "lines")
    return {"bars": _Bars, "lines": _Lines, "json": _JsonLines, "quiet": _Display}[kind]()


class _Display:
    """Shows stages, each by its title: how many of its steps are done, of how many (``None`` where nobody knows).

    Machines know a stage by its name, which stays the same; titles are for people.

    This one shows nothing.
    """

    def report(self, stage: str, title: str, done: int, total: int | None) -> None:
        """Show that a stage has come so far."""

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Show how far the last stage came."""


class _Bars(_Display):
    """A bar for each stage in a terminal, with its rate and the time that is left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.text import Text

        class Rate(ProgressColumn):
            def render(self, task: Any) -> Text:
                return Text("" if not task.speed else f"{_number(task.speed)}/s", style="progress.data.speed")

        self._tasks: dict[str, Any] = {}
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate()
        self._bars = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))

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
class _Seen:
    """How far a stage has come, and since when it runs."""

    name: str
    title: str
    done: int = 0
    total: int | None = None
    said: tuple[int, int | None] | None = None
    start: float = field(default_factory=lambda: time.monotonic())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def rate(self) -> float | None:
        return self.done / self.seconds if self.done and self.seconds > 0 else None

    @property
    def left(self) -> float | None:
        return (self.total - self.done) / self.rate if self.rate and self.total is not None else None


class _Lines(_Display):
    """A line when a stage begins and ends, and every half minute between, also while nothing is reported."""

    beat = BEAT

    def __init__(self) -> None:
        self._stages: dict[str, _Seen] = {}
        self._now: _Seen | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._clock = threading.Thread(target=self._keep_time, daemon=True)

    def report(self, stage: str, title: str, done: int, total: int | None) -> None:
        with self._lock:
            seen = self._stages.setdefault(stage, _Seen(stage, title))
            seen.done, seen.total = done, total
            if seen is not self._now:
                before, self._now = self._now, seen
                for one in (before, seen):  # stages take turns: what a line has said is not said again
                    if one is not None and one.said != (one.done, one.total):
                        self._write(one)

    def _keep_time(self) -> None:
        while not self._over.wait(self.beat):
            with self._lock:
                if self._now is not None:
                    self._write(self._now)

    def _write(self, stage: _Seen) -> None:
        stage.said = (stage.done, stage.total)
        print(self.line(stage), file=sys.stderr, flush=True)  # noqa: T201

    def line(self, stage: _Seen) -> str:
        """Return where a stage stands."""
        if stage.total is None:
            return f"{stage.title}: {duration(stage.seconds)}" if stage.seconds >= 1 else f"{stage.title} …"
        words = [f"{stage.title}: {stage.done:,} of {stage.total:,}"]
        if stage.seconds >= 1:
            words.append(duration(stage.seconds))
        if stage.rate and stage.seconds >= 1:
            words.append(f"{_number(stage.rate)} a second")
        if stage.left and stage.seconds >= 1:
            words.append(f"{duration(stage.left)} left")
        return ", ".join(words)

    def __enter__(self) -> typing.Self:
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._clock.join()
        if self._now is not None and self._now.seconds >= 1:
            self._write(self._now)


class _JsonLines(_Lines):
    """The same for machines, every second."""

    beat = JSON_BEAT

    def line(self, stage: _Seen) -> str:
        known = {
            "stage": stage.name,
            "title": stage.title,
            "done": stage.done,
            "total": stage.total,
            "seconds": round(stage.seconds, 2),
        }
        return json.dumps(known | {"seconds_left": None if stage.left is None else round(stage.left, 1)})

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._clock.join()
        if self._now is not None:
            self._write(self._now)


def duration(seconds: float) -> str:
    """Return a time in words.

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
