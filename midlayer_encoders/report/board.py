"""Many runs beside each other: what their layers score and cost, which nothing beats, and which fits a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import Baselines, Curve, Summary
from midlayer_encoders.report.axes import Axis, amount_axis
from midlayer_encoders.report.charts import Chart, Dots, Front, Line, Mark, Panel, Part, Rule, value_axis
from midlayer_encoders.report.scores import average_levels
from midlayer_encoders.report.style import STYLES
from midlayer_encoders.report.ticks import Cost, cost_words, number

__all__ = ["COSTS", "Budget", "Point", "Run", "board_chart", "chosen", "front", "fronts_of"]

COSTS: Mapping[Cost, str] = {
    "parameters": "parameters",
    "milliseconds": "milliseconds per text",
    "bytes": "bytes per vector",
}
"""What an encoder costs, and how an axis names it."""

Budget: TypeAlias = Mapping[Cost, float]
"""The most that each cost may be; what is not in it may be anything."""


@dataclass(frozen=True)
class Point:
    """A layer of a run: what it scores, in points, and what it costs, as far as that is known."""

    run: str
    layer: int
    score: float
    costs: Mapping[Cost, float]

    def words(self) -> str:
        """Return all of it, in two lines."""
        return f"{self.run}, layer {self.layer}: {number(self.score)} points\n{cost_words(self.costs)}".rstrip("\n")


@dataclass(frozen=True)
class Run:
    """One model at one revision under one recipe, swept.

    Attributes:
        name: another one for every run of a board.
        folder: of the sweep, as people are shown it.
        summary: of its scores on the tasks that all runs share.
        parameters: of the model cut at each layer.
        milliseconds: of a text, up to each layer.
        bytes: of a vector.
        device: that the time was measured on.
        page: address of its own page; empty for none.
    """

    name: str
    folder: str
    summary: Summary
    parameters: Mapping[int, int] = field(default_factory=dict)
    milliseconds: Mapping[int, float] = field(default_factory=dict)
    bytes: int | None = None
    device: str = ""
    page: str = ""

    @property
    def average(self) -> Curve:
        """The mean score by layer; a run without one is on no board."""
        if self.summary.average is None:
            raise OptionError(
                f"`runs` must have a layer that was scored on every shared task, but {self.name} has none."
            )
        return self.summary.average

    @property
    def points(self) -> list[Point]:
        """Its layers."""
        return [Point(self.name, layer, score, self._costs(layer)) for layer, score in self.average.points.items()]

    @property
    def best(self) -> Point:
        """Its best layer."""
        return next(point for point in self.points if point.layer == self.average.best_layer)

    def _costs(self, layer: int) -> dict[Cost, float]:
        known: dict[Cost, float | None] = {
            "parameters": self.parameters.get(layer),
            "milliseconds": self.milliseconds.get(layer),
            "bytes": self.bytes,
        }
        return {cost: value for cost, value in known.items() if value is not None}


def front(points: Iterable[Point], cost: Cost) -> list[Point]:
    """Return the points that no other beats for the same cost or less, the cheapest first.

    Example:
        >>> points = [Point("m", k, score, {"bytes": 10 * k}) for k, score in ((1, 5.0), (2, 4.0), (3, 7.0))]
        >>> [point.layer for point in front(points, "bytes")]
        [1, 3]
    """
    kept: list[Point] = []
    for point in sorted((one for one in points if cost in one.costs), key=lambda one: (one.costs[cost], -one.score)):
        if not kept or point.score > kept[-1].score:
            kept.append(point)
    return kept


def fronts_of(runs: Sequence[Run]) -> dict[str, list[Cost]]:
    """Return by name of each run on which fronts its best layer is, among all layers of all runs."""
    every = [point for run in runs for point in run.points]
    on = {cost: {(one.run, one.layer) for one in front(every, cost)} for cost in COSTS}
    return {run.name: [cost for cost in COSTS if (run.name, run.best.layer) in on[cost]] for run in runs}


def chosen(points: Sequence[Point], budget: Budget) -> Point:
    """Return the point with the highest score within a budget; of equal ones that with fewer parameters.

    Raises:
        OptionError: there is none within it; it names the nearest.
    """
    known = [point for point in points if all(cost in point.costs for cost in budget)]
    within = [point for point in known if all(point.costs[cost] <= most for cost, most in budget.items())]
    if within:
        return max(within, key=lambda one: (one.score, -one.costs.get("parameters", 0.0), -one.layer))
    if not known:
        what = " and ".join(COSTS[cost] for cost in budget)
        raise OptionError(
            f"The budget must be of what the runs have noted, but none has {what}: sweep them again with this version, "
            "which goes on from what is kept."
        )
    nearest = min(known, key=lambda one: (max(one.costs[cost] / most for cost, most in budget.items()), -one.score))
    raise OptionError(
        f"The budget must leave one encoder at least, but none is within {cost_words(budget)}: the nearest is "
        f"{nearest.run} at layer {nearest.layer}, {number(nearest.score)} points, {cost_words(nearest.costs)}."
    )


def board_chart(
    runs: Sequence[Run],
    baselines: Baselines | None = None,
    budget: Budget | None = None,
    marked: Point | None = None,
) -> Chart:
    """Return the score of every layer of every run against each cost, the best layers marked, the front drawn.

    Args:
        runs: at least one.
        baselines: drawn as levels.
        budget: drawn as upright lines.
        marked: the layer that was chosen within it.
    """
    scores = [Line((), tuple(run.average.points.values())) for run in runs]
    y = value_axis([*scores, *average_levels(runs[0].summary, baselines or {})])
    known = [cost for cost in COSTS if any(cost in point.costs for run in runs for point in run.points)]
    panels = []
    for cost in known:
        panel = _panel(runs, cost, y, baselines or {}, (budget or {}).get(cost))
        if marked is not None and cost in marked.costs:
            panel = replace(panel, parts=(*panel.parts, Mark("best", marked.costs[cost], marked.score, "")))
        panels.append(panel)
    return Chart(tuple(panels), columns=1, size=(7.5, 3.2), head=True)


def _panel(runs: Sequence[Run], cost: Cost, y: Axis, baselines: Baselines, most: float | None) -> Panel:
    points = [point for run in runs for point in run.points if cost in point.costs]
    best = front(points, cost)
    levels = [replace(level, label=level.text) for level in average_levels(runs[0].summary, baselines)]
    x = amount_axis(COSTS[cost], [*(point.costs[cost] for point in points), *([] if most is None else [most])])
    costs, scores = [one.costs[cost] for one in best], [one.score for one in best]
    ahead = Front((*costs, x.high), (*scores, scores[-1]), "Pareto front")
    parts: list[Part] = [ahead, *levels, *([] if most is None else [Rule(most, "chosen")])]
    drawn = [_run_parts(run, cost, place % STYLES) for place, run in enumerate(runs)]
    parts += [part for some in drawn for part in some if isinstance(part, Line)]
    parts += [part for some in drawn for part in some if isinstance(part, Dots)]
    title = f"Score by {COSTS[cost]}"
    label = f"{title}. " + "; ".join(one.words().replace("\n", ", ") for one in best)
    return Panel(title, x, y, tuple(parts), label)


def _run_parts(run: Run, cost: Cost, style: int) -> list[Part]:
    """Return the curve of a run where its layers differ in a cost, and its best layer."""
    points = [point for point in run.points if cost in point.costs]
    if not points:
        return []
    x, y = tuple(one.costs[cost] for one in points), tuple(one.score for one in points)
    curve = [Line(x, y, run.name, style, tips=tuple(one.words() for one in points))] if len(set(x)) > 1 else []
    best, links = run.best, (run.page,) if run.page else ()
    at = (best.costs[cost],) if cost in best.costs else ()  # of an older run two layers were timed
    disc = [Dots(at, (best.score,), "disc", run.name, style, (best.words(),), links=links)] if at else []
    return [*curve, *disc]
