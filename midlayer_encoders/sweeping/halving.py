"""Sweep growing samples within a time budget, without the layers that are clearly worse: successive halving."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

from midlayer_encoders._types import Layer
from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping.sweep_result import SweepResult
from midlayer_encoders.validation import check_number

#: Rows of the first round.
FIRST_LIMIT = 64
#: Rows of a round over those of the one before.
GROWTH = 4


#: Sweeps some layers on a sample of so many rows; ``None`` for all.
RunRound: TypeAlias = Callable[[int | None, Sequence[Layer] | str], SweepResult]


@dataclass(frozen=True)
class Verdict:
    """What a round tells about its layers, by the intervals of a paired bootstrap.

    Attributes:
        kept: layers that are not clearly worse than the best, and the last layer.
        dropped: for each other layer its score and the interval of its gain over the best, in points.
        is_clear: every layer is clearly worse than the best, the last one included.
    """

    kept: tuple[int, ...]
    dropped: tuple[tuple[int, float, float, float], ...]
    is_clear: bool

    @classmethod
    def of(cls, result: SweepResult) -> Self:
        """Return the verdict of a round."""
        average = None if result.scores.is_empty() else result.summary().average
        if average is None:
            return cls((), (), False)
        best, last, points = average.best_layer, average.last_layer, average.points
        gains = {layer: result.gain(layer, over=best) for layer in points if layer != best}
        worse = {layer: gain for layer, gain in gains.items() if gain.high < 0}
        dropped = [(layer, points[layer], gain.low, gain.high) for layer, gain in worse.items() if layer != last]
        kept = tuple(layer for layer in points if layer == last or layer not in worse)
        return cls(kept, tuple(dropped), len(worse) == len(gains))


def check_minutes(
    budget: float, *, limit: int | None, recipes: object, processes: int, has_labels: bool = True
) -> float:
    """Return the minutes of a budget; raise an error if they are not positive, or do not fit other arguments."""
    minutes = check_number("budget", budget)
    if minutes == 0:
        raise OptionError("`budget` must be above 0 minutes, but got 0.")
    if not has_labels:
        raise OptionError(
            "`budget` must be left out without a task that has labels: layers are compared by their scores."
        )
    others = {
        "`limit`": limit is not None,
        "`recipes`, `dims` and `precisions`": recipes is not None,
        "several `devices`": processes > 1,
    }
    for name, is_given in others.items():
        if is_given:
            raise OptionError(f"{name} must be left out with `budget`, which sweeps one model on growing samples.")
    return minutes


def sweep_within(minutes: float, run: RunRound, layers: Sequence[Layer] | str) -> SweepResult:
    """Return the result of the last round, whose notes describe all rounds.

    A round has :data:`GROWTH` times the rows of the one before and only the layers that it kept. It starts if it is
    expected to end within the budget: it takes as many times longer as it has more rows, or as the last one did if that
    is more. The first round always runs. Rounds end when one layer is clearly the best, or all rows are scored.
    """
    start = time.monotonic()
    rounds: list[dict[str, Any]] = []
    limit: int | None = FIRST_LIMIT
    while True:
        began = time.monotonic()
        result = run(limit, layers)
        seconds = time.monotonic() - began
        verdict = Verdict.of(result)
        rounds.append({"limit": limit, "seconds": seconds, "layers": len(result.scores["layer"].unique())})
        growth = max(GROWTH, seconds / rounds[-2]["seconds"] if len(rounds) > 1 else 0)
        if limit is None:
            end = "all rows were scored"
        elif not verdict.kept:
            end = "no layer was scored on every task"
        elif verdict.is_clear:
            end = "one layer is clearly the best"
        elif time.monotonic() - start + growth * seconds > 60 * minutes:
            end = f"the next round, about {growth * seconds / 60:.2g} minutes, would not fit"
        else:
            rounds[-1]["dropped"] = [list(layer) for layer in verdict.dropped]
            layers = verdict.kept
            counts = [counts for splits in result.notes.rows.values() for counts in splits.values()]
            limit = None if all(total <= GROWTH * count for count, total, _ in counts) else GROWTH * limit
            continue
        rounds[-1] |= {"end": end, "minutes": (time.monotonic() - start) / 60, "budget": minutes}
        result = replace(result, notes=replace(result.notes, rounds=rounds))
        result.save()
        return result
