"""Scores against costs: the layers of several sweeps, the Pareto front, and the best layer within a budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.summaries import Curve, Gain, Summary

#: What an encoder costs.
Cost: TypeAlias = Literal["parameters", "milliseconds", "tokens", "bytes"]

#: The label of each cost on an axis.
COSTS: Mapping[Cost, str] = {
    "parameters": "parameters",
    "milliseconds": "milliseconds per text",
    "tokens": "tokens per text",
    "bytes": "bytes per vector",
}

#: The maximum of each cost; a cost that is missing is not limited.
Budget: TypeAlias = Mapping[Cost, float]


@dataclass(frozen=True)
class Point:
    """The score of one layer of a run, in points, and its known costs."""

    run: str
    layer: int
    score: float
    costs: Mapping[Cost, float]

    def describe(self) -> str:
        """Return the score and the costs, in two lines."""
        return f"{self.run}, layer {self.layer}: {self.score:.1f} points\n{cost_text(self.costs)}".rstrip("\n")


@dataclass(frozen=True)
class Run:
    """The sweep of one model at one revision with one recipe.

    Attributes:
        name: unique among the runs of a board.
        folder: name of the sweep's folder.
        summary: scores on the tasks that all runs share.
        parameters: of the model cut at each layer.
        milliseconds: per text, up to each layer.
        tokens: per text, that the model reads.
        bytes: per vector.
        device: on which the time was measured.
        page: URL of the sweep's page; empty if there is none.
        gain: of the best layer over the last, for its interval.
    """

    name: str
    folder: str
    summary: Summary
    parameters: Mapping[int, int] = field(default_factory=dict)
    milliseconds: Mapping[int, float] = field(default_factory=dict)
    tokens: float | None = None
    bytes: int | None = None
    device: str = ""
    page: str = ""
    gain: Gain | None = None

    @property
    def average(self) -> Curve:
        """The mean score by layer; a board refuses runs without one."""
        return cast(Curve, self.summary.average)

    @property
    def points(self) -> list[Point]:
        """One point per layer."""
        return [Point(self.name, layer, score, self._costs(layer)) for layer, score in self.average.points.items()]

    @property
    def best(self) -> Point:
        """The point of the best layer."""
        return next(point for point in self.points if point.layer == self.average.best_layer)

    def _costs(self, layer: int) -> dict[Cost, float]:
        values = (self.parameters.get(layer), self.milliseconds.get(layer), self.tokens, self.bytes)
        return {cost: value for cost, value in zip(COSTS, values, strict=True) if value is not None}


def pareto_front(points: Iterable[Point], cost: Cost) -> list[Point]:
    """Return the points that no other point beats at the same or a lower cost, cheapest first.

    Example:
        >>> points = [Point("m", k, score, {"bytes": 10 * k}) for k, score in ((1, 5.0), (2, 4.0), (3, 7.0))]
        >>> [point.layer for point in pareto_front(points, "bytes")]
        [1, 3]
    """
    front: list[Point] = []
    priced = [point for point in points if cost in point.costs]
    for point in sorted(priced, key=lambda point: (point.costs[cost], -point.score)):
        if not front or point.score > front[-1].score:
            front.append(point)
    return front


def fronts_by_run(runs: Sequence[Run]) -> dict[str, list[Cost]]:
    """Return, for each run, the costs for which its best layer is on the Pareto front of all layers of all runs."""
    points = [point for run in runs for point in run.points]
    members = {cost: {(point.run, point.layer) for point in pareto_front(points, cost)} for cost in COSTS}
    return {run.name: [cost for cost in COSTS if (run.name, run.best.layer) in members[cost]] for run in runs}


def best_within(points: Sequence[Point], budget: Budget) -> Point:
    """Return the point with the highest score within a budget; ties go to the point with fewer parameters.

    Raises:
        OptionError: if no point is within the budget; the message names the nearest one.
    """
    priced = [point for point in points if all(cost in point.costs for cost in budget)]
    affordable = [point for point in priced if all(point.costs[cost] <= limit for cost, limit in budget.items())]
    if affordable:
        return max(affordable, key=lambda point: (point.score, -point.costs.get("parameters", 0.0), -point.layer))
    if not priced:
        unknown = " and ".join(COSTS[cost] for cost in budget)
        raise OptionError(
            f"The budget must limit costs that the runs recorded, but no run recorded {unknown}: run the sweeps again "
            "with this version; they resume from their saved results."
        )
    nearest = min(
        priced, key=lambda point: (max(point.costs[cost] / limit for cost, limit in budget.items()), -point.score)
    )
    raise OptionError(
        f"The budget must allow at least one encoder, but none is within {cost_text(budget)}: the nearest is "
        f"{nearest.run} at layer {nearest.layer}, {nearest.score:.1f} points, {cost_text(nearest.costs)}."
    )


def amount(value: float) -> str:
    """Return a positive amount of any size with three significant digits.

    Example:
        >>> amount(22_713_216), amount(1.24e9), amount(30_000), amount(1536), amount(0.01234)
        ('22.7M', '1.24B', '30k', '1536', '0.0123')
    """
    for threshold, unit, letter in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= threshold:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.{4 if value >= 1e3 else 3}g}"


def cost_text(costs: Mapping[Cost, float]) -> str:
    """Return the known costs of an encoder as text.

    Example:
        >>> cost_text({"parameters": 22_713_216, "milliseconds": 1.25})
        '22.7M parameters, 1.25 ms per text'
    """
    units = {**COSTS, "milliseconds": "ms per text"}
    return ", ".join(f"{amount(value)} {units[cost]}" for cost, value in costs.items())
