"""Where long work stands: bars in a terminal, lines elsewhere, JSON for machines, nothing where none is wanted.

All of it goes to the error output, so that what a command prints can be kept by itself.
"""

from __future__ import annotations

import functools
import inspect
import json
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

__all__ = ["duration", "first_process", "json_asked", "long_running", "shown", "silence", "waiting"]

Kind = Literal["bars", "lines", "json", "quiet"]
BEAT = 30.0  # seconds between two lines of one stage
JSON_BEAT = 1.0

_asked: Kind | None = None  # by the flags of the command that runs

_Command = TypeVar("_Command", bound=Callable[..., Any])


def long_running(command: _Command) -> _Command:
    """Give a command the flags ``--quiet`` and ``--json``, which say how its progress is shown."""
    hints = typing.get_type_hints(command, include_extras=True)
    own = [one.replace(annotation=hints[one.name]) for one in inspect.signature(command).parameters.values()]
    flags = {
        "quiet": ("--quiet", "Show no progress."),
        "json_lines": ("--json", "Show progress as JSON lines on the error output, for machines."),
    }
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False,
            annotation=Annotated[bool, typer.Option(flag, help=told, rich_help_panel="Progress")],
        )
        for name, (flag, told) in flags.items()
    ]  # fmt: skip

    @functools.wraps(command)
    def run(*, quiet: bool, json_lines: bool, **given: Any) -> Any:
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


def first_process() -> bool:
    """Return whether this is the first of the processes that torchrun, SLURM or Fabric started for one command."""
    known = next((name for name in ("RANK", "SLURM_PROCID") if name in os.environ), None)
    return all(os.environ.get(name, "0") == "0" for name in ([known] if known else ["NODE_RANK", "LOCAL_RANK"]))


def json_asked() -> bool:
    """Return whether the command that runs was given ``--json``."""
    return _asked == "json"


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
                display.report((titles or {}).get(stage, stage), done, total)

        yield report


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Show that something is being done whose end is not known, as loading a model."""
    with _display() as display:
        display.report(title, 0, None)
        yield


def _display() -> AbstractContextManager[_Display]:
    kind = _asked or ("bars" if sys.stderr.isatty() else "lines")
    return {"bars": _Bars, "lines": _Lines, "json": _JsonLines, "quiet": _Display}[kind]()


class _Display:
    """Shows stages, each by its title: how many of its steps are done, of how many (``None`` where nobody knows).

    This one shows nothing.
    """

    def report(self, title: str, done: int, total: int | None) -> None:
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

    def report(self, title: str, done: int, total: int | None) -> None:
        if title not in self._tasks:
            self._tasks[title] = self._bars.add_task(title, total=total)
        self._bars.update(self._tasks[title], completed=done, total=total)

    def __enter__(self) -> typing.Self:
        self._bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.__exit__(*error)


@dataclass
class _Seen:
    """How far a stage has come, and since when it runs."""

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

    def report(self, title: str, done: int, total: int | None) -> None:
        with self._lock:
            stage = self._stages.setdefault(title, _Seen(title))
            stage.done, stage.total = done, total
            if stage is not self._now:
                before, self._now = self._now, stage
                for one in (before, stage):  # stages take turns: what a line has said is not said again
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
        known = {"stage": stage.title, "done": stage.done, "total": stage.total, "seconds": round(stage.seconds, 2)}
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
