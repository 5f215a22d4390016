"""A training history: the tidy frame with a step in ``revision``, as arrays; what changes, and what has settled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.frame.schema import check_frame

Values: TypeAlias = NDArray[np.float64]

_STEP = re.compile(r"(?:^|[^a-z])(?:step|checkpoint)[-_=]?(\d+)(?!\d)", flags=re.IGNORECASE)


@dataclass(frozen=True)
class History:
    """One metric (or score) of one model on one set of texts, by step and layer.

    Attributes:
        name: of the metric.
        dataset: what the texts are called.
        title: the name, with the texts where the frame has several.
        steps: S of them, ascending.
        layers: L of them, ascending.
        values: shape ``(S, L)``; NaN where nothing was measured or the value was not finite.
    """

    name: str
    dataset: str
    title: str
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    values: Values

    @property
    def span(self) -> float:
        """The metric's range over all steps and layers; 0 where there is no finite value, or only one."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite.max() - finite.min()) if finite.size else 0.0

    def of_layer(self, layer: int) -> list[tuple[int, float]]:
        """Return the steps at which a layer has a finite value, and that value."""
        values = self.values[:, self.layers.index(layer)].tolist()
        return [(step, value) for step, value in zip(self.steps, values, strict=True) if np.isfinite(value)]


def step_of(revision: str) -> int:
    """Return the training step that a revision's or a checkpoint's name holds.

    Example:
        >>> step_of("step512"), step_of("checkpoint-500"), step_of("stage1-step1000-tokens5B")
        (512, 500, 1000)
        >>> step_of("main")
        Traceback (most recent call last):
        ...
        midlayer_encoders.errors.OptionError: `revision` must name a training step, as 'step512' or 'checkpoint-512', \
but got 'main'.
    """
    found = _STEP.search(revision)
    if found is None or len(found[1]) > 18:  # more is no number of steps, and no integer of a frame
        raise OptionError(
            f"`revision` must name a training step, as 'step512' or 'checkpoint-512', but got {short_repr(revision)}."
        )
    return int(found[1])


def step_word(step: int) -> str:
    """Return a step as an axis shows it.

    Example:
        >>> step_word(512), step_word(16_000), step_word(2_000_000)
        ('512', '16k', '2M')
    """
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if step and step % unit == 0:
            return f"{step // unit}{letter}"
    return str(step)


def thinned(count: int, most: int) -> list[int]:
    """Return at most ``most`` places of ``count``, evenly spaced, the last one among them.

    Example:
        >>> thinned(5, 3), thinned(2, 8)
        ([0, 2, 4], [0, 1])
    """
    every = max(1, -(-(count - 1) // max(most - 1, 1)))
    return [place for place in range(count) if (count - 1 - place) % every == 0]


def histories(frame: pl.DataFrame) -> list[History]:
    """Return the history of each metric and score of one model, in the frame's order; all have the same steps.

    Args:
        frame: tidy, of one model, whose revisions name steps.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", f"step{s}", k, float(k), "metric", "t", "curvature", s + k) for s in (2, 1) for k in (0, 1)]
        >>> (history,) = histories(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> history.steps, history.values.tolist()
        ((1, 2), [[1.0, 2.0], [2.0, 3.0]])
    """
    frame = check_frame(frame).filter(pl.col("kind") != "confirmed")  # the same scores again, of a few layers
    if frame.is_empty():
        raise OptionError("`frame` must have at least one row, but got none: nothing was measured.")
    models = frame["model"].unique(maintain_order=True).to_list()
    if len(models) > 1:
        raise OptionError(f"`frame` must hold one model here, but got {', '.join(models[:4])}; filter it first.")
    of = {revision: step_of(revision) for revision in frame["revision"].unique(maintain_order=True)}
    steps = sorted(set(of.values()))
    if len(steps) < len(of):
        raise OptionError(
            f"`frame` must have one revision for each step, but got {', '.join(of)}; rename or drop some."
        )
    several = frame["dataset"].n_unique() > 1
    return [
        _history(str(name), str(dataset), rows, of, tuple(steps), several=several)
        for (_, dataset, name), rows in frame.group_by("kind", "dataset", "name", maintain_order=True)
    ]


def _history(
    name: str, dataset: str, rows: pl.DataFrame, of: dict[str, int], steps: tuple[int, ...], *, several: bool
) -> History:
    layers = tuple(sorted(rows["layer"].unique().to_list()))
    values = np.full((len(steps), len(layers)), np.nan)
    for revision, layer, value in rows.select("revision", "layer", "value").iter_rows():
        values[steps.index(of[revision]), layers.index(layer)] = value if np.isfinite(value) else np.nan
    return History(name, dataset, f"{name} ({dataset})" if several else name, steps, layers, values)


def layer_changes(frame: pl.DataFrame) -> pl.DataFrame:
    r"""Return how much each layer changes between a step and the one before it that was measured.

    .. math::
        \frac{|m_{s}(k) - m_{s'}(k)|}{\max_{s,k} m_s(k) - \min_{s,k} m_s(k)}

    for layer k at steps s' < s; a step at which the layer has no finite value is passed over.

    Args:
        frame: tidy, of one model, whose revisions name steps.

    Returns:
        A frame ``dataset, name, layer, previous, step, change, relative``: the two steps, the absolute change, and its
        share of the metric's range over all steps and layers, between ``0`` and ``1`` (``0`` for a constant).

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> values = {1: (5.0, 1.0), 2: (5.0, 3.0)}
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "dime", v[k]) for s, v in values.items() for k in (0, 1)]
        >>> layer_changes(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row")).select("layer", "relative").rows()
        [(0, 0.0), (1, 0.5)]
    """
    rows = [
        (one.dataset, one.name, layer, *steps, change, change / one.span if one.span else 0.0)
        for one in histories(frame)
        for layer in one.layers
        for *steps, change in _moves(one.of_layer(layer))
    ]
    names = {"dataset": pl.String, "name": pl.String, "layer": pl.Int64, "previous": pl.Int64, "step": pl.Int64}
    return pl.DataFrame(rows, schema=names | {"change": pl.Float64, "relative": pl.Float64}, orient="row")


def _moves(known: list[tuple[int, float]]) -> list[tuple[int, int, float]]:
    return [(previous, step, abs(after - before)) for (previous, before), (step, after) in pairwise(known)]


def settled(frame: pl.DataFrame, *, within: float = 0.1) -> pl.DataFrame:
    """Return the first step from which on each layer stays near its final value.

    Near is within a share of the metric's range over all steps and layers, as in :func:`layer_changes`: a share of the
    value itself would mean nothing for a metric that passes through zero. The final value is that of the last step at
    which the layer has one; steps without a finite value are passed over.

    Args:
        frame: tidy, of one model, whose revisions name steps.
        within: the share, in ``(0, 1)``.

    Returns:
        A frame ``dataset, name, layer, step, final``. A layer that settles at the last step only moved until the end.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> values = {1: (5.0, 1.0), 2: (5.1, 3.0), 4: (5.0, 3.1)}
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "dime", v[k]) for s, v in values.items() for k in (0, 1)]
        >>> settled(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row")).select("layer", "step").rows()
        [(0, 1), (1, 2)]
    """
    if not 0 < within < 1:
        raise OptionError(f"`within` must be a share in (0, 1) of the metric's range, as 0.1, but got {within}.")
    rows = []
    for one in histories(frame):
        for layer in one.layers:
            known = one.of_layer(layer)
            if known:
                final = known[-1][1]
                far = [place for place, (_, value) in enumerate(known) if abs(value - final) > within * one.span]
                rows.append((one.dataset, one.name, layer, known[far[-1] + 1 if far else 0][0], final))
    names = {"dataset": pl.String, "name": pl.String, "layer": pl.Int64, "step": pl.Int64, "final": pl.Float64}
    return pl.DataFrame(rows, schema=names, orient="row")
