"""Training histories: frames whose revisions name steps, as arrays; changes between steps, and settled layers."""

import re
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.frame.schema import check_frame

_CURVE = ["kind", "dataset", "name"]
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
    values: NDArray[np.float64]


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


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced places of ``count``, including the last.

    Example:
        >>> evenly_spaced(5, 3), evenly_spaced(2, 8)
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
    table = _with_steps(frame)
    steps = sorted(table["step"].unique())
    several = table["dataset"].n_unique() > 1
    measured = []
    for (_, dataset, name), rows in table.group_by(_CURVE, maintain_order=True):
        layers = sorted(rows["layer"].unique())
        finite = rows.filter(pl.col("value").is_finite())
        values = np.full((len(steps), len(layers)), np.nan)
        values[np.searchsorted(steps, finite["step"]), np.searchsorted(layers, finite["layer"])] = finite["value"]
        title = f"{name} ({dataset})" if several else str(name)
        measured.append(History(str(name), str(dataset), title, tuple(steps), tuple(layers), values))
    return measured


def _with_steps(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of one model with the column ``step``, each curve sorted by layer and step."""
    frame = check_frame(frame).filter(pl.col("kind") != "confirmed")  # repeated scores of a few layers
    models = frame["model"].unique(maintain_order=True).to_list()
    if len(models) != 1:
        raise OptionError(
            f"`frame` must hold one model here, but got {', '.join(models[:4]) or 'no row: nothing was measured'}; "
            "filter it first."
        )
    steps = {revision: step_of(revision) for revision in frame["revision"].unique(maintain_order=True)}
    if len(set(steps.values())) < len(steps):
        raise OptionError(
            f"`frame` must have one revision for each step, but got {', '.join(steps)}; rename or drop some."
        )
    step = pl.col("revision").replace_strict(steps, return_dtype=pl.Int64)
    first_row = pl.int_range(pl.len()).min().over(_CURVE)
    return frame.with_columns(step=step).sort(first_row, "layer", "step")


def _finite_steps(frame: pl.DataFrame) -> pl.DataFrame:
    """Return :func:`_with_steps` without other values than finite ones, and the range of each curve as ``span``."""
    finite = _with_steps(frame).filter(pl.col("value").is_finite())
    return finite.with_columns(span=(pl.col("value").max() - pl.col("value").min()).over(_CURVE))


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
    layer = [*_CURVE, "layer"]
    previous = pl.col("step").shift().over(layer)
    change = pl.col("value").diff().abs().over(layer)
    changes = _finite_steps(frame).with_columns(previous=previous, change=change).drop_nulls("previous")
    relative = pl.when(pl.col("span") > 0).then(pl.col("change") / pl.col("span")).otherwise(0.0)
    return changes.select("dataset", "name", "layer", "previous", "step", "change", relative=relative)


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
    layer = [*_CURVE, "layer"]
    values = _finite_steps(frame).with_columns(final=pl.col("value").last().over(layer))
    is_far = (pl.col("value") - pl.col("final")).abs() > within * pl.col("span")
    near = values.filter(is_far.cum_sum(reverse=True).over(layer) == 0)
    return near.group_by(layer, maintain_order=True).first().select("dataset", "name", "layer", "step", "final")
