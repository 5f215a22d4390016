"""Seeded cases run one by one: each must end, in time, with a result without NaN or with an error of ours."""

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import pytest

from midlayer_encoders.errors import MidlayerError

__all__ = ["Case", "TookTooLong", "check_cases", "in_time", "seeds"]

Case: TypeAlias = Callable[[Random], tuple[str, Callable[[], Any]]]
"""From a generator to what is tried, in words, and the call that tries it."""

_SECONDS = 20  # for a case that takes milliseconds, on a machine that does other things too
_SHOWN = 400


class TookTooLong(BaseException):
    """A case that did not end; not an ``Exception``, so that nothing takes it for a file that cannot be read."""


@contextmanager
def in_time(seconds: int = _SECONDS) -> Iterator[None]:
    """Raise :class:`TookTooLong` where what is inside has not ended after so many seconds."""

    def stop(*_: Any) -> None:
        raise TookTooLong(f"did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def seeds(quick: int, parts: int, size: int) -> Any:
    """Run a test with the first ``quick`` cases, and with later ones in parts of ``size`` for ``make test-slow``."""
    slow = [pytest.param(size * (part + 1), size, marks=pytest.mark.slow) for part in range(parts)]
    return pytest.mark.parametrize(("first", "count"), [(0, quick), *slow])


def check_cases(make: Case, name: str, first: int, count: int) -> None:
    """Run cases ``first`` to ``first + count`` of a target and fail with those that broke, each cause once."""
    broken: dict[str, str] = {}
    for seed in range(first, first + count):
        shown, call = make(Random(f"{name} {seed}"))
        try:
            with in_time():
                call()
        except MidlayerError as error:
            if not str(error).strip():
                broken.setdefault("an error without words", f"{name} {seed}: {shown[:_SHOWN]}")
        except (Exception, TookTooLong) as error:
            broken.setdefault(_cause(error), f"{ascii(str(error))[:_SHOWN]}\n  {name} {seed}: {ascii(shown)[:_SHOWN]}")
    words = "\n".join(f"- {cause}\n  {case}" for cause, case in broken.items())
    assert not broken, f"{len(broken)} causes:\n{words}"


def _cause(error: BaseException) -> str:
    """Return what was raised, and the last line of ours that led there."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "midlayer_encoders" in Path(frame.filename).parts] or frames
    place = f"{'/'.join(Path(ours[-1].filename).parts[-2:])}:{ours[-1].lineno}"
    return f"{type(error).__name__} at {place}"
