"""Correlate each metric's curve over layers with each task's score: distance correlation, Spearman and Kendall.

Any two curves over a few neighboring layers correlate, because neighboring layers are similar. Each correlation
therefore comes with the values that the same two curves reach when one of them is shifted against the other.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from midlayer_encoders.errors import OptionError, pluralize
from midlayer_encoders.frame.curves import ByLayer, curves_by_dataset, mean_curve
from midlayer_encoders.frame.schema import check_frame

#: Rank correlations, distance correlation (0 to 1), and the latter with Spearman's sign.
STATISTICS = ("spearman", "kendall", "dcor", "signed_dcor")

#: The columns of :func:`correlate`; an undefined correlation has an empty ``value`` and the reason in ``note``.
CORRELATION_SCHEMA = pl.Schema(
    dict.fromkeys(("model", "revision", "metric", "task", "statistic"), pl.String())
    | dict.fromkeys(("value", "p", "threshold"), pl.Float64())
    | {"layers": pl.Int64(), "note": pl.String()}
)

#: Largest ``p`` of a correlation that stands out: one in 20 does by chance.
LEVEL = 0.05

_MIN_LAYERS = 4  # with 3, ranks can only agree fully, half or not at all
_Values = NDArray[np.float64]


def correlate(frame: pl.DataFrame | Sequence[pl.DataFrame]) -> pl.DataFrame:
    r"""Return the correlation of each metric's curve over layers with each task's score, and with their average.

    A task is paired with the metric on its own texts if the metric was measured on them (equal ``dataset``), and
    otherwise with the metric's mean over all texts. ``task`` is ``"average"`` for the mean metric against the mean
    score, over the tasks that are paired with their own texts, or all of them if none is.

    ``p`` is the share of shifts (see :func:`shifted_curves`) of the metric's curve against the score whose correlation
    is at least as far from zero, the unshifted one included, so it is at least one over their number. A value
    farther from zero than ``threshold`` has a ``p`` of at most 0.05. ``threshold`` is empty below 11 layers, which have
    fewer than 20 shifts.

    Args:
        frame: tidy results of one or more models with metrics and scores, such as a sweep's; or several such frames.

    Returns:
        One row for each model, revision, metric, task and statistic, with the columns of ``CORRELATION_SCHEMA``.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> dime, sts = [5.0, 4.0, 3.0, 2.0, 1.0], [0.1, 0.2, 0.4, 0.5, 0.7]
        >>> rows = [("m", "main", k, k / 4, "metric", "texts", "dime", v) for k, v in enumerate(dime)]
        >>> rows += [("m", "main", k, k / 4, "score", "STS", "spearman", v) for k, v in enumerate(sts)]
        >>> correlations = correlate(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> correlations.filter(task="average").select("statistic", pl.col("value").round(2)).rows()
        [('spearman', -1.0), ('kendall', -1.0), ('dcor', 0.99), ('signed_dcor', -0.99)]
    """
    frames = [frame] if isinstance(frame, pl.DataFrame) else frame
    table = check_frame(pl.concat([check_frame(part) for part in frames]))
    for kind in ("metric", "score"):
        if table.filter(kind=kind).is_empty():
            raise OptionError(
                f"`frame` must have rows of kind 'metric' and of kind 'score', but has no {kind}s; "
                "a sweep with `metrics=` has both."
            )
    rows: list[dict[str, object]] = []
    for (model, revision), part in table.group_by("model", "revision", maintain_order=True):
        for metric, task, curve, score in _curve_pairs(part):
            layers = sorted(set(curve) & set(score))
            x, y = (np.array([by_layer[layer] for layer in layers]) for by_layer in (curve, score))
            columns = {"model": model, "revision": revision, "metric": metric, "task": task, "layers": len(layers)}
            if note := _undefined_note({metric: x, task: y}):
                rows += [columns | {"statistic": name, "note": note} for name in STATISTICS]
            else:
                rows += [columns | row for row in _statistic_rows(x, y)]
    return pl.DataFrame(rows, schema=CORRELATION_SCHEMA)


def _curve_pairs(part: pl.DataFrame) -> Iterator[tuple[str, str, ByLayer, ByLayer]]:
    """Yield each metric of one model with the average and then each task."""
    scores = curves_by_dataset(part.filter(kind="score"))
    metric_rows = part.filter(kind="metric")
    for name in metric_rows["name"].unique(maintain_order=True):
        curves = curves_by_dataset(metric_rows.filter(name=name))
        if not curves or not scores:
            continue
        shared_tasks = [task for task in scores if task in curves]
        mean_of_all = mean_curve(list(curves.values()))
        average = mean_curve([curves[task] for task in shared_tasks]) if shared_tasks else mean_of_all
        yield name, "average", average, mean_curve([scores[task] for task in shared_tasks or scores])
        for task, score in scores.items():
            yield name, task, curves.get(task, mean_of_all), score


def _statistic_rows(x: _Values, y: _Values) -> Iterator[dict[str, object]]:
    """Yield the value of each statistic and its place among the values of shifted curves."""
    for name, (value, *others) in _statistics(shifted_curves(x), y).items():
        distances = np.sort(np.abs(others))
        p = (1 + np.count_nonzero(distances >= abs(value) - 1e-9)) / (1 + len(others))  # rounding breaks no ties
        rank = int((1 + len(others)) * LEVEL)
        threshold = distances[-rank] if rank else None
        yield {"statistic": name, "value": value, "p": p, "threshold": threshold, "note": ""}


def shifted_curves(curve: _Values) -> _Values:
    r"""Return curves with the same steps between neighboring layers, shifted circularly, forward and backward.

    .. math::
        x^{(s)}_k = x_0 + \sum_{i=1}^{k} d_{1 + (i - 1 + s) \bmod L}, \qquad d_i = x_i - x_{i-1}

    and the same with the steps in reverse order. Shifting the steps instead of the values keeps ends, drift and
    smoothness of the curve: shifted values would jump where the last layer meets the first.

    Args:
        curve: one value per layer, shape ``(L + 1,)``, not constant.

    Returns:
        Shape ``(2 * L, L + 1)``; the first row is the curve, all are divided by its range.

    Example:
        >>> shifted_curves(np.array([0.0, 1.0, 1.0, 0.5]))[:3]
        array([[ 0. ,  1. ,  1. ,  0.5],
               [ 0. ,  0. , -0.5,  0.5],
               [ 0. , -0.5,  0.5,  0.5]])
    """
    steps = np.diff(curve / np.ptp(curve))
    orders = [np.roll(order, -shift) for order in (steps, steps[::-1]) for shift in range(len(steps))]
    curves: _Values = np.cumsum(np.pad(orders, ((0, 0), (1, 0))), axis=1)
    return curves.round(12)  # equal values stay equal


def _undefined_note(curves: Mapping[str, _Values]) -> str:
    """Return why two curves have no correlation, or an empty string."""
    for name, curve in curves.items():
        if len(curve) < _MIN_LAYERS:
            return f"undefined: both exist at {pluralize(len(curve), 'layer')}, at least {_MIN_LAYERS} are needed"
        if np.ptp(curve) <= 1e-12 * np.abs(curve).max():
            return f"undefined: {name} is the same at every layer"
    return ""


def _statistics(x: _Values, y: _Values) -> dict[str, _Values]:
    """Return each statistic of curves ``(S, N)`` with a curve ``(N,)``, shape ``(S,)``."""
    from scipy.stats import rankdata

    # Correlations of ranks and of the signs of all differences; scipy's functions also test, which takes ten times
    # as long.
    middle = (len(y) + 1) / 2
    spearman = _cosine(rankdata(x, axis=-1) - middle, rankdata(y) - middle)
    kendall = _cosine(np.sign(_differences(x)), np.sign(_differences(y)))
    distance = _distance_correlation(x, y)
    return {"spearman": spearman, "kendall": kendall, "dcor": distance, "signed_dcor": np.sign(spearman) * distance}


def distance_correlation(x: _Values, y: _Values) -> float:
    r"""Return the distance correlation of two samples (Székely et al., 2007), biased as in the paper.

    .. math::
        \mathcal R^2 = \frac{\langle A, B \rangle}{\lVert A \rVert \lVert B \rVert}, \qquad
        A_{ij} = |x_i - x_j| - \bar a_i - \bar a_j + \bar a

    with :math:`\bar a_i` the mean distance of sample i from the others and :math:`\bar a` the mean of those.

    Args:
        x: shape ``(N,)``.
        y: shape ``(N,)``.

    Returns:
        Between ``0`` and ``1``; ``0`` if one of them is constant.

    Example:
        >>> round(distance_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])), 6)
        1.0
    """
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(_distance_correlation(x, y))


def _distance_correlation(x: _Values, y: _Values) -> _Values:
    squares: _Values = np.maximum(_cosine(_centered_distances(x), _centered_distances(y)), 0.0)
    return np.sqrt(squares)


def _differences(x: _Values) -> _Values:
    """Return the differences between all pairs of the last axis, flattened to shape ``(*, N * N)``."""
    return (x[..., :, None] - x[..., None, :]).reshape(*x.shape[:-1], -1)


def _centered_distances(x: _Values) -> _Values:
    """Return the distances between all pairs, minus the means of row and column, flattened to shape ``(*, N * N)``."""
    distances = np.abs(_differences(x)).reshape(*x.shape, x.shape[-1])
    means = distances.mean(axis=-1)
    centered: _Values = distances - means[..., :, None] - means[..., None, :] + means.mean(axis=-1)[..., None, None]
    return centered.reshape(*x.shape[:-1], -1)


def _cosine(x: _Values, y: _Values) -> _Values:
    cosines: _Values = x @ y / np.sqrt((x * x).sum(axis=-1) * (y @ y))
    return cosines
