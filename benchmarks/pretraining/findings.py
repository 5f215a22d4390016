"""What the record's frames say, as numbers: when things form, how deep the valley is, which layer is best, what rules cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.pretraining.record import TOKENS, Run
from midlayer_encoders.frame.curves import Curves, curves
from midlayer_encoders.frame.steps import History, layer_changes, settled
from midlayer_encoders.selection import RULES
from midlayer_encoders.selection.rules import CannotChooseError, choose

__all__ = [
    "EVENTS", "RAW", "THIRDS", "WITHOUT_LABELS", "Event", "Valley", "Winner", "crossing", "event", "event_layer", "gained",
    "leads", "lowering", "mean_by_layer", "moved", "overtaking", "regrets", "settled_at", "thirds", "valley", "winners",
]  # fmt: skip

Values = NDArray[np.float64]
RAW = "prompt_entropy_raw"
WITHOUT_LABELS = tuple(rule for rule in RULES if rule != "few-labels")
THIRDS = {"1 to 4": range(1, 5), "5 to 8": range(5, 9), "9 to 12": range(9, 13)}  # of the layers


@dataclass(frozen=True)
class Valley:
    """Where an entropy is lowest between the first layer and the last, and how far below both it lies."""

    layer: int
    lowest: float
    depth: float


def valley(values: Sequence[float] | Values) -> Valley:
    """Return the valley of a curve over all layers; a depth of 0 or less is none.

    Example:
        >>> valley([4.0, 3.0, 2.5, 3.5])
        Valley(layer=2, lowest=2.5, depth=1.0)
    """
    inner = [float(value) for value in values]
    layer = min(range(1, len(inner) - 1), key=inner.__getitem__)
    return Valley(layer, inner[layer], min(inner[0], inner[-1]) - inner[layer])


def lowering(run: Run) -> History:
    """Return by how much the first token lowers the entropy of raw states: without it, less with it."""
    with_it, without = run.metric(RAW), run.metric(RAW, "probe-later")
    return History("lowering", "probe", "", with_it.steps, with_it.layers, without.values - with_it.values)


@dataclass(frozen=True)
class Event:
    """When something forms at the layer where it ends up strongest.

    Attributes:
        layer: that layer.
        final: its value at the end.
        tenth: tokens at which it passes a tenth of that for good.
        half: tokens at which it passes half.
        nine_tenths: tokens at which it passes nine tenths.
    """

    layer: int
    final: float
    tenth: float
    half: float
    nine_tenths: float


# What forms, in words; the largest state is read where the first token's share is largest, since it stays in the
# stream from there on and grows a little with every block.
EVENTS: dict[str, Callable[[Run], History]] = {
    "first token's share of the squared norm": lambda run: run.metric("first_token_share"),
    "largest state, at that layer": lambda run: _at(
        run.metric("largest_state"), event_layer(run.metric("first_token_share"))
    ),
    "heads that attend to it (sink rate)": lambda run: run.metric("attention_sink_rate"),
    "drop in entropy, nats": lowering,
}


def _at(one: History, layer: int) -> History:
    place = one.layers.index(layer)
    return History(one.name, one.dataset, one.title, one.steps, (layer,), one.values[:, [place]])


def event_layer(one: History) -> int:
    """Return the layer with the highest value at the end."""
    return one.layers[int(np.nanargmax(one.values[-1]))]


def event(one: History) -> Event:
    """Return when a history that starts near zero reached what it ends with."""
    layer = event_layer(one)
    curve = one.values[:, one.layers.index(layer)]
    final = float(curve[-1])
    return Event(layer, final, *(crossing(one.steps, curve, share * final) for share in (0.1, 0.5, 0.9)))


def crossing(steps: Sequence[int], values: Sequence[float] | Values, level: float) -> float:
    """Return the tokens seen when a curve passed a level for the last time, on a line over the logarithm of the step.

    Example:
        >>> round(crossing([0, 1, 4, 16], [0.0, 0.0, 1.0, 3.0], 2.0) / TOKENS)
        8
    """
    below = [place for place, value in enumerate(values) if not value >= level]
    if not below:
        return float(steps[0] * TOKENS)
    left = below[-1]
    if left + 1 == len(steps):
        return math.inf
    share = float((level - values[left]) / (values[left + 1] - values[left]))
    ends = [math.log(max(step, 0.5)) for step in steps[left : left + 2]]
    return TOKENS * math.exp(ends[0] + share * (ends[1] - ends[0]))


@dataclass(frozen=True)
class Winner:
    """The mean scores at a stage: of the embeddings, of the best block before the last, of the last."""

    step: int
    first: float
    layer: int
    best: float
    last: float


def winners(run: Run, recipe: str = "plain") -> list[Winner]:
    """Return the layers' scores at each stage."""
    scores = run.scores(recipe)
    made = []
    for step, row in zip(scores.steps, scores.values.tolist(), strict=True):
        layer = max(range(1, len(row) - 1), key=row.__getitem__)
        made.append(Winner(step, row[0], layer, row[layer], row[-1]))
    return made


def leads(run: Run, *, over: int, stage: int = -1) -> list[float]:
    """Return by how many points the best of layers 1 to 11 is ahead of a layer on each task, by default at the end."""
    winner = winners(run)[stage]
    pairs = zip(run.task_scores(winner.step, winner.layer), run.task_scores(winner.step, over), strict=True)
    return [best - other for best, other in pairs]


def gained(run: Run, layer: int) -> list[float]:
    """Return the points that a layer gains from the first stage of a run to the last, on each task."""
    stages = run.scores().steps
    before, after = (run.task_scores(step, layer) for step in (stages[0], stages[-1]))
    return [end - start for start, end in zip(before, after, strict=True)]


def overtaking(run: Run) -> tuple[int | None, int | None]:
    """Return the first stages from which on a middle block beats the embeddings, and the last layer, until the end."""
    found = winners(run)

    def since(wins: Callable[[Winner], bool]) -> int | None:
        lost = [place for place, one in enumerate(found) if not wins(one)]
        later = found[lost[-1] + 1 :] if lost else found
        return later[0].step if later else None

    return since(lambda one: one.best > one.first), since(lambda one: one.best > one.last)


def regrets(run: Run) -> dict[str, dict[int, tuple[int, float]]]:
    """Return for each rule without labels, at each stage, the layer it chooses and the points it loses to the best.

    A rule that cannot choose, as where there is no valley, takes the last layer. ``valley-midpoint (raw)`` reads the
    entropy of raw states.
    """
    scores = run.scores()
    found: dict[str, dict[int, tuple[int, float]]] = {}
    for step, row in zip(scores.steps, scores.values.tolist(), strict=True):
        measured = run.frame.filter(kind="metric", dataset="probe", revision=f"step{step}")
        swapped = measured.filter(pl.col("name") == RAW).with_columns(name=pl.lit("prompt_entropy"))
        usual = _curves(measured)
        given = {rule: (rule, usual) for rule in WITHOUT_LABELS}
        given["valley-midpoint (raw)"] = "valley-midpoint", _curves(swapped)
        for name, (rule, seen) in given.items():
            try:
                layer = choose(seen, rule)[0]
            except CannotChooseError:
                layer = len(row) - 1
            found.setdefault(name, {})[step] = (layer, max(row) - row[layer])
    return found


def _curves(rows: pl.DataFrame) -> Curves:
    return curves(rows.cast({"depth": pl.Float64, "value": pl.Float64, "layer": pl.Int64}))


def moved(run: Run, name: str, since: int) -> dict[int, float]:
    """Return by how much each layer moves from look to look after a step, summed, as a share of the metric's range."""
    changes = layer_changes(_of_metric(run, name)).filter(pl.col("previous") >= since)
    return dict(changes.group_by("layer").agg(pl.col("relative").sum()).sort("layer").iter_rows())


def settled_at(run: Run, name: str) -> dict[int, int]:
    """Return the step from which on each layer stays within a tenth of the metric's range from its final value."""
    return dict(settled(_of_metric(run, name), within=0.1).select("layer", "step").iter_rows())


def _of_metric(run: Run, name: str) -> pl.DataFrame:
    return run.frame.filter(kind="metric", name=name, dataset="probe")


def thirds(by_layer: Mapping[int, float]) -> list[float]:
    """Return the mean over each third of the layers, of those that are there."""
    return [fmean(by_layer[layer] for layer in third if layer in by_layer) for third in THIRDS.values()]


def mean_by_layer(found: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean over runs at each layer."""
    return {layer: fmean(one[layer] for one in found) for layer in found[0]}
