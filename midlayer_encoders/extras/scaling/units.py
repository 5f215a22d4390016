"""Units of work, and the loop that hands them to an executor until all are done."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any, Protocol

from midlayer_encoders._types import Stage
from midlayer_encoders.errors import MidlayerError, error_summary
from midlayer_encoders.extras.scaling.executors import adapted

_ATTEMPTS = 3  # of a unit whose process ends
_POLL_SECONDS = 0.05


class Unit(Protocol):
    """Work that any process of any machine can do, as often as it likes: small, hashable, and it can be pickled."""

    @property
    def label(self) -> str:
        """What an error is about."""

    @property
    def is_done(self) -> bool:
        """Whether its files are there."""

    def run(self) -> None:
        """Do the work and write its files."""


class ProcessLostError(MidlayerError):
    """The process of a unit ended without a result, each time."""


def call_unit(unit: Unit) -> str | None:
    """Do the work of a unit in a process of an executor, and return its error, which the driver shows."""
    try:
        unit.run()
    except MidlayerError as error:
        return str(error)
    except Exception as error:
        return error_summary(error)
    return None


def run_units(units: Sequence[Unit], executor: Any, *, stage: Stage) -> dict[Unit, MidlayerError]:
    """Run the units that are not done, and return the errors of those that failed.

    A unit whose process ends is submitted again, three times at most; the others continue. At an interruption, those
    that have not begun are canceled.

    Args:
        units: in any order.
        executor: with ``submit(function, *arguments)``, which returns something with ``result()``.
        stage: counts units.
    """
    engine = adapted(executor)
    stage.expect(len(units))
    left = [unit for unit in units if not unit.is_done]
    stage.step(len(units) - len(left))
    attempts: Counter[Unit] = Counter()
    errors: dict[Unit, MidlayerError] = {}
    running: list[tuple[Unit, Any]] = []
    try:
        while left or running:
            running += zip(left, engine.submit_all(call_unit, left), strict=True) if left else []
            left = []
            has_ended = engine.finished([future for _, future in running])
            ended = [pair for pair, done in zip(running, has_ended, strict=True) if done]
            running = [pair for pair, done in zip(running, has_ended, strict=True) if not done]
            for unit, future in ended:
                try:
                    if (error := future.result()) is not None:
                        errors[unit] = MidlayerError(error)
                except (Exception, CancelledError) as reason:  # of the engine: the process was lost
                    attempts[unit] += 1
                    if not unit.is_done and attempts[unit] < _ATTEMPTS:
                        left.append(unit)
                        continue
                    if not unit.is_done:
                        lost = f"its process ended {_ATTEMPTS} times without a result: {error_summary(reason)}"
                        errors[unit] = ProcessLostError(lost)
                stage.step()
            if not ended:
                time.sleep(_POLL_SECONDS)
    except BaseException:
        for _, future in running:
            future.cancel()
        raise
    return errors
