"""Correlate each metric's curve over layers with each task's score: distance correlation, Spearman and Kendall."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from midlayer_encoders.errors import OptionError, counted
from midlayer_encoders.frame.curves import ByLayer, curves_by_dataset, mean_curve
from midlayer_encoders.frame.schema import check_frame

#: Rank correlations, distance correlation (0 to 1), and the latter with Spearman's sign.
STATISTICS = ("spearman", "kendall", "dcor", "signed_dcor")

#: The columns of :func:`correlate`; an undefined correlation has an empty ``value`` and the reason in ``note``.
CORRELATION_SCHEMA = pl.Schema(
    dict.fromkeys(("model", "revision", "metric", "task", "statistic"), pl.String())
    | dict.fromkeys(("value", "low", "high"), pl.Float64())
    | {"layers": pl.Int64(), "note": pl.String()}
)

_MIN_LAYERS = 4  # with 3, ranks can only agree fully, half or not at all
_Values = NDArray[np.float64]


def correlate(frame: pl.DataFrame | Sequence[pl.DataFrame], *, resamples: int = 200, seed: int = 0) -> pl.DataFrame:
    r"""Return the correlation of each metric's curve over layers with each task's score, and with their average.

    A task is paired with the metric on its own texts if the metric was measured on them (equal ``dataset``), and
    otherwise with the metric's mean over all texts. ``task`` is ``"average"`` for the mean metric against the mean
    score, over the tasks that are paired with their own texts, or all of them if none is.

    Intervals are 95 % of a moving-block bootstrap over layers: neighboring layers are similar, so runs of
    layers, as long as the square root of their number, are drawn with replacement until there are as many as before.

    Args:
        frame: tidy results of one or more models with metrics and scores, such as a sweep's; or several such frames.
        resamples: draws for the intervals; 0 leaves them empty.
        seed: for the draws.

    Returns:
        One row for each model, revision, metric, task and statistic, with the columns of ``CORRELATION_SCHEMA``.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> dime, sts = [5.0, 4.0, 3.0, 2.0, 1.0], [0.1, 0.2, 0.4, 0.5, 0.7]
        >>> rows = [("m", "main", k, k / 4, "metric", "texts", "dime", v) for k, v in enumerate(dime)]
        >>> rows += [("m", "main", k, k / 4, "score", "STS", "spearman", v) for k, v in enumerate(sts)]
        >>> correlations = correlate(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"), resamples=0)
        >>> correlations.filter(task="average").select("statistic", pl.col("value").round(2)).rows()
        [('spearman', -1.0), ('kendall', -1.0), ('dcor', 0.99), ('signed_dcor', -0.99)]
    """
    if resamples < 0:
        raise OptionError(f"`resamples` must be 0 or more, but got {resamples}.")
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
                draws = _block_draws(len(x), max(2, round(len(x) ** 0.5)), resamples, seed)
                rows += [columns | row for row in _statistic_rows(x, y, draws)]
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


def _statistic_rows(x: _Values, y: _Values, draws: NDArray[np.int64]) -> Iterator[dict[str, object]]:
    """Yield value and interval of each statistic."""
    values = _statistics(x, y)
    resampled = [_statistics(x[draw], y[draw]) for draw in draws if np.ptp(x[draw]) > 0 and np.ptp(y[draw]) > 0]
    for name, value in values.items():
        row: dict[str, object] = {"statistic": name, "value": value, "note": ""}
        if resampled:
            row["low"], row["high"] = np.quantile([statistics[name] for statistics in resampled], [0.025, 0.975])
        yield row


def _undefined_note(curves: Mapping[str, _Values]) -> str:
    """Return why two curves have no correlation, or an empty string."""
    for name, curve in curves.items():
        if len(curve) < _MIN_LAYERS:
            return f"undefined: both exist at {counted(len(curve), 'layer')}, at least {_MIN_LAYERS} are needed"
        if np.ptp(curve) <= 1e-12 * np.abs(curve).max():
            return f"undefined: {name} is the same at every layer"
    return ""


def _statistics(x: _Values, y: _Values) -> dict[str, float]:
    from scipy.stats import rankdata

    # Correlations of ranks and of the signs of all differences; scipy's functions also test, which takes ten times
    # as long.
    spearman = _cosine(rankdata(x) - (len(x) + 1) / 2, rankdata(y) - (len(y) + 1) / 2)
    kendall = _cosine(np.sign(x[:, None] - x).ravel(), np.sign(y[:, None] - y).ravel())
    distance = distance_correlation(x, y)
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
    return float(np.sqrt(max(_cosine(_centered_distances(x), _centered_distances(y)), 0.0)))


def _centered_distances(x: _Values) -> _Values:
    """Return the distances between all pairs, minus the means of row and column, flattened to shape ``(N * N,)``."""
    distances = np.abs(x[:, None] - x)
    means = distances.mean(axis=0)
    centered: _Values = distances - means[:, None] - means + means.mean()
    return centered.ravel()


def _cosine(x: _Values, y: _Values) -> float:
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _block_draws(count: int, block: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """Return positions of moving blocks, drawn with replacement, shape ``(resamples, count)``."""
    block = min(block, count)
    num_blocks = -(-count // block)
    starts = np.random.default_rng(seed).integers(0, count - block + 1, size=(resamples, num_blocks))
    return (starts[:, :, None] + np.arange(block)).reshape(resamples, num_blocks * block)[:, :count]
