"""Training histories: frames whose revisions name steps, as arrays; changes between steps, and settled layers."""

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
    """One metric or score of one model on one dataset, by step and layer.

    Attributes:
        name: of the metric.
        dataset: on which it was measured.
        title: the name, followed by the dataset if the frame has several.
        steps: S of them, ascending.
        layers: L of them, ascending.
        values: shape ``(S, L)``; NaN if missing or not finite.
    """

    name: str
    dataset: str
    title: str
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    values: Values

    @property
    def span(self) -> float:
        """The metric's range over all steps and layers; 0 without two finite values."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite.max() - finite.min()) if finite.size else 0.0

    def of_layer(self, layer: int) -> list[tuple[int, float]]:
        """Return the steps at which a layer has a finite value, with the values."""
        values = self.values[:, self.layers.index(layer)].tolist()
        return [(step, value) for step, value in zip(self.steps, values, strict=True) if np.isfinite(value)]


def step_of(revision: str) -> int:
    """Return the training step in the name of a revision or checkpoint.

    Example:
        >>> step_of("step512"), step_of("checkpoint-500"), step_of("stage1-step1000-tokens5B")
        (512, 500, 1000)
        >>> step_of("main")
        Traceback (most recent call last):
        ...
        midlayer_encoders.errors.OptionError: `revision` must name a training step, as 'step512' or 'checkpoint-512', \
but got 'main'.
    """
    match = _STEP.search(revision)
    if match is None or len(match[1]) > 18:  # longer numbers do not fit into a column of integers
        raise OptionError(
            f"`revision` must name a training step, as 'step512' or 'checkpoint-512', but got {short_repr(revision)}."
        )
    return int(match[1])


def step_word(step: int) -> str:
    """Return the label of a step on an axis.

    Example:
        >>> step_word(512), step_word(16_000), step_word(2_000_000)
        ('512', '16k', '2M')
    """
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if step and step % unit == 0:
            return f"{step // unit}{letter}"
    return str(step)


def thinned(count: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced places of ``count``, including the last.

    Example:
        >>> thinned(5, 3), thinned(2, 8)
        ([0, 2, 4], [0, 1])
    """
    stride = max(1, -(-(count - 1) // max(most - 1, 1)))
    return [place for place in range(count) if (count - 1 - place) % stride == 0]


def histories(frame: pl.DataFrame) -> list[History]:
    """Return the history of each metric and score of one model; all have the same steps.

    Args:
        frame: tidy, of one model, whose revisions name steps.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", f"step{s}", k, float(k), "metric", "t", "curvature", s + k) for s in (2, 1) for k in (0, 1)]
        >>> (history,) = histories(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> history.steps, history.values.tolist()
        ((1, 2), [[1.0, 2.0], [2.0, 3.0]])
    """
    frame = check_frame(frame).filter(pl.col("kind") != "confirmed")  # repeated scores of a few layers
    if frame.is_empty():
        raise OptionError("`frame` must have at least one row, but got none: nothing was measured.")
    models = frame["model"].unique(maintain_order=True).to_list()
    if len(models) > 1:
        raise OptionError(f"`frame` must hold one model here, but got {', '.join(models[:4])}; filter it first.")
    step_by_revision = {revision: step_of(revision) for revision in frame["revision"].unique(maintain_order=True)}
    steps = sorted(set(step_by_revision.values()))
    if len(steps) < len(step_by_revision):
        raise OptionError(
            f"`frame` must have one revision for each step, but got {', '.join(step_by_revision)}; rename or drop some."
        )
    several = frame["dataset"].n_unique() > 1
    measured = []
    for (_, dataset, name), rows in frame.group_by("kind", "dataset", "name", maintain_order=True):
        layers = tuple(rows["layer"].unique().sort())
        values = np.full((len(steps), len(layers)), np.nan)
        for revision, layer, value in rows.select("revision", "layer", "value").iter_rows():
            if np.isfinite(value):
                values[steps.index(step_by_revision[revision]), layers.index(layer)] = value
        title = f"{name} ({dataset})" if several else str(name)
        measured.append(History(str(name), str(dataset), title, tuple(steps), layers, values))
    return measured


def layer_changes(frame: pl.DataFrame) -> pl.DataFrame:
    r"""Return how much each layer changes between successive measured steps.

    .. math::
        \frac{|m_{s}(k) - m_{s'}(k)|}{\max_{s,k} m_s(k) - \min_{s,k} m_s(k)}

    for layer k at steps s' < s; steps without a finite value of the layer are skipped.

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
    rows = []
    for history in histories(frame):
        for layer in history.layers:
            for (previous, before), (step, after) in pairwise(history.of_layer(layer)):
                change = abs(after - before)
                share = change / history.span if history.span else 0.0
                rows.append((history.dataset, history.name, layer, previous, step, change, share))
    schema = {"dataset": pl.String, "name": pl.String, "layer": pl.Int64, "previous": pl.Int64, "step": pl.Int64}
    return pl.DataFrame(rows, schema=schema | {"change": pl.Float64, "relative": pl.Float64}, orient="row")


def settled(frame: pl.DataFrame, *, within: float = 0.1) -> pl.DataFrame:
    """Return the step from which each layer stays near its final value.

    Near means within a share of the metric's range over all steps and layers, as in :func:`layer_changes`; a share of
    the value would be meaningless for metrics that cross zero. The final value is the last finite one; steps without a
    finite value are skipped.

    Args:
        frame: tidy, of one model, whose revisions name steps.
        within: the share, in ``(0, 1)``.

    Returns:
        A frame ``dataset, name, layer, step, final``. A layer whose step is the last one has not settled.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> values = {1: (5.0, 1.0), 2: (5.1, 3.0), 4: (5.0, 3.1)}
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "dime", v[k]) for s, v in values.items() for k in (0, 1)]
        >>> settled(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row")).select("layer", "step").rows()
        [(0, 1), (1, 2)]
    """
    if not 0 < within < 1:
        raise OptionError(f"`within` must be a share in (0, 1) of the metric's range, such as 0.1, but got {within}.")
    rows = []
    for history in histories(frame):
        for layer in history.layers:
            if values := history.of_layer(layer):
                final = values[-1][1]
                far = [place for place, (_, value) in enumerate(values) if abs(value - final) > within * history.span]
                first_near = far[-1] + 1 if far else 0
                rows.append((history.dataset, history.name, layer, values[first_near][0], final))
    schema = {"dataset": pl.String, "name": pl.String, "layer": pl.Int64, "step": pl.Int64, "final": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")
