"""At which steps of a training run to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from midlayer_encoders.errors import OptionError

__all__ = ["Cadence", "EveryNSteps", "make_cadence"]

EveryNSteps: TypeAlias = int | Sequence[int] | Literal["log2"]
"""A number of steps, the steps themselves, or ``"log2"``: steps 1, 2, 4, 8 … as Pythia's checkpoints are spaced."""


@dataclass(frozen=True)
class Cadence:
    """Which optimizer steps are due; step ``0``, before the first one, is due except where steps are listed."""

    every: int = 0
    steps: frozenset[int] = frozenset()

    def due(self, step: int) -> bool:
        """Return whether to measure after ``step`` optimizer steps.

        Example:
            >>> [step for step in range(20) if make_cadence("log2").due(step)]
            [0, 1, 2, 4, 8, 16]
            >>> [step for step in range(20) if make_cadence(8).due(step)]
            [0, 8, 16]
        """
        if self.steps:
            return step in self.steps
        if self.every:
            return step % self.every == 0
        return step & (step - 1) == 0  # a power of two, or 0


def make_cadence(every_n_steps: EveryNSteps) -> Cadence:
    """Return the cadence that ``every_n_steps`` asks for."""
    if every_n_steps == "log2":
        return Cadence()
    if isinstance(every_n_steps, bool | str | float) or every_n_steps is None:
        raise OptionError(
            f"`every_n_steps` must be a number of steps, a list of steps or 'log2', but got {every_n_steps!r}."
        )
    if isinstance(every_n_steps, int):
        if every_n_steps < 1:
            raise OptionError(
                f"`every_n_steps` must be 1 or more, but got {every_n_steps}. Pass 'log2' to measure rarely."
            )
        return Cadence(every=every_n_steps)
    steps = list(every_n_steps)
    if not steps or any(not isinstance(step, int) or isinstance(step, bool) or step < 0 for step in steps):
        raise OptionError(f"`every_n_steps` as a list must hold steps of 0 or more, but got {steps}.")
    return Cadence(steps=frozenset(steps))
