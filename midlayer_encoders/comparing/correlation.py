"""How a metric's curve over layers goes with a score's: distance correlation, Spearman, Kendall, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import ByLayer, check_frame, curves_by_dataset, mean_curve

__all__ = ["CORRELATION_SCHEMA", "STATISTICS", "correlate", "distance_correlation"]

STATISTICS = ("spearman", "kendall", "dcor", "signed_dcor")
"""Rank correlations, distance correlation (0 to 1), and the latter with Spearman's sign."""

CORRELATION_SCHEMA = pl.Schema(
    {
        "model": pl.String(),
        "revision": pl.String(),
        "metric": pl.String(),
        "task": pl.String(),
        "statistic": pl.String(),
        "value": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "layers": pl.Int64(),
        "note": pl.String(),
    }
)
"""The columns of :func:`correlate`; where there is no correlation ``value`` is empty and ``note`` says why."""

_LEAST = 4  # layers: with 3, ranks can only agree wholly, half or not at all
_Values = NDArray[np.float64]


@dataclass(frozen=True)
class _Pair:
    """A metric's curve and a task's, over the layers that both have."""

    metric: str
    task: str
    layers: tuple[int, ...]
    x: _Values
    y: _Values


def correlate(
    frame: pl.DataFrame | Sequence[pl.DataFrame],
    *,
    metrics: Sequence[str] | None = None,
    resamples: int = 200,
    block: int | None = None,
    seed: int = 0,
) -> pl.DataFrame:
    r"""Return how each metric's curve over layers goes with each task's score, and with their average.

    A task is paired with the metric on its own texts where the metric was measured on them (equal ``dataset``), and
    otherwise with the metric's mean over all texts. ``task`` is ``"average"`` for the mean metric against the mean
    score, over the tasks that are paired with their own texts, or all of them where none is.

    Intervals are 95 % of a moving-block bootstrap over layers: neighboring layers are alike, so whole runs of
    ``block`` layers are drawn with replacement until there are as many as before.

    Args:
        frame: tidy results of one or more models with rows of both kinds, as a sweep's; or several such frames.
        metrics: which metrics; all by default.
        resamples: draws for the intervals; 0 leaves them empty.
        block: layers drawn together; by default the square root of their number.
        seed: of the draws.

    Returns:
        One row for each model, revision, metric, task and statistic, with the columns of ``CORRELATION_SCHEMA``.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> dime, sts = [5.0, 4.0, 3.0, 2.0, 1.0], [0.1, 0.2, 0.4, 0.5, 0.7]
        >>> rows = [("m", "main", k, k / 4, "metric", "texts", "dime", v) for k, v in enumerate(dime)]
        >>> rows += [("m", "main", k, k / 4, "score", "STS", "spearman", v) for k, v in enumerate(sts)]
        >>> found = correlate(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"), resamples=0)
        >>> found.filter(task="average").select("statistic", pl.col("value").round(2)).rows()
        [('spearman', -1.0), ('kendall', -1.0), ('dcor', 0.99), ('signed_dcor', -0.99)]
    """
    if resamples < 0 or (block is not None and block < 1):
        raise OptionError(f"`resamples` must be 0 or more and `block` 1 or more, but got {resamples} and {block}.")
    table = check_frame(frame if isinstance(frame, pl.DataFrame) else pl.concat([check_frame(one) for one in frame]))
    _check_kinds(table, metrics)
    rows: list[dict[str, object]] = []
    for (model, revision), part in table.group_by("model", "revision", maintain_order=True):
        for pair in _pairs(part, metrics):
            found = _row_values(pair, resamples=resamples, block=block, seed=seed)
            start = {"model": model, "revision": revision, "metric": pair.metric, "task": pair.task}
            rows += [{**start, **one, "layers": len(pair.layers)} for one in found]
    return pl.DataFrame(rows, schema=CORRELATION_SCHEMA)


def _check_kinds(table: pl.DataFrame, metrics: Sequence[str] | None) -> None:
    for kind in ("metric", "score"):
        if table.filter(kind=kind).is_empty():
            raise OptionError(
                f"`frame` must have rows of kind 'metric' and of kind 'score', but has no {kind}s; "
                "a sweep with `metrics=` has both."
            )
    known = table.filter(kind="metric")["name"].unique().sort().to_list()
    missing = [name for name in metrics or () if name not in known]
    if missing:
        raise OptionError(
            f"`metrics` must be in the frame, which has {', '.join(known)}, but got {', '.join(missing)}."
        )


def _pairs(part: pl.DataFrame, metrics: Sequence[str] | None) -> Iterator[_Pair]:
    """Yield each metric of one model with the average and then each task."""
    scores = curves_by_dataset(part.filter(kind="score"))
    measured = part.filter(kind="metric")
    for name in metrics or measured["name"].unique(maintain_order=True).to_list():
        curves = curves_by_dataset(measured.filter(name=name))
        if not curves or not scores:
            continue
        own = [task for task in scores if task in curves]
        everywhere = mean_curve(list(curves.values()))
        average = mean_curve([curves[task] for task in own]) if own else everywhere
        yield _pair(name, "average", average, mean_curve([scores[task] for task in own or scores]))
        for task, score in scores.items():
            yield _pair(name, task, curves.get(task, everywhere), score)


def _pair(metric: str, task: str, first: ByLayer, second: ByLayer) -> _Pair:
    layers = tuple(sorted(set(first) & set(second)))
    x, y = (np.array([curve[layer] for layer in layers], dtype=np.float64) for curve in (first, second))
    return _Pair(metric, task, layers, x, y)


def _row_values(pair: _Pair, *, resamples: int, block: int | None, seed: int) -> list[dict[str, object]]:
    """Return value, interval and note of each statistic."""
    note = _why_not(pair)
    if note:
        return [{"statistic": name, "value": None, "low": None, "high": None, "note": note} for name in STATISTICS]
    count = len(pair.layers)
    drawn = _blocks(count, block or max(2, round(count**0.5)), resamples, seed)
    draws = [one for one in drawn if np.ptp(pair.x[one]) > 0 and np.ptp(pair.y[one]) > 0]
    values = _statistics(pair.x, pair.y)
    spread = {name: [] for name in STATISTICS} if not draws else _many(pair, draws)
    rows: list[dict[str, object]] = []
    for name in STATISTICS:
        low, high = np.quantile(spread[name], [0.025, 0.975]) if spread[name] else (None, None)
        rows.append({"statistic": name, "value": values[name], "low": low, "high": high, "note": ""})
    return rows


def _why_not(pair: _Pair) -> str:
    """Return why two curves have no correlation, or nothing."""
    if len(pair.layers) < _LEAST:
        return f"undefined: {len(pair.layers)} layers have both, at least {_LEAST} are needed"
    for name, curve in ((pair.metric, pair.x), (pair.task, pair.y)):
        if np.ptp(curve) <= 1e-12 * np.abs(curve).max():
            return f"undefined: {name} is the same at every layer"
    return ""


def _many(pair: _Pair, draws: Sequence[NDArray[np.int64]]) -> dict[str, list[float]]:
    found = [_statistics(pair.x[one], pair.y[one]) for one in draws]
    return {name: [one[name] for one in found] for name in STATISTICS}


def _statistics(x: _Values, y: _Values) -> dict[str, float]:
    from scipy.stats import rankdata

    # Correlations of ranks and of the signs of all differences: scipy's own also test, which takes ten times as long.
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
        Between ``0`` and ``1``; ``0`` where one of them is constant.

    Example:
        >>> round(distance_correlation(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])), 6)
        1.0
    """
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.sqrt(max(_cosine(_centered_distances(x), _centered_distances(y)), 0.0)))


def _centered_distances(x: _Values) -> _Values:
    """Return the distances between all pairs, less the means of row and column, flat: shape ``(N * N,)``."""
    distances = np.abs(x[:, None] - x)
    means = distances.mean(axis=0)
    centered: _Values = distances - means[:, None] - means + means.mean()
    return centered.ravel()


def _cosine(x: _Values, y: _Values) -> float:
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def _blocks(count: int, block: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """Return positions of moving blocks, with replacement, shape ``(resamples, count)``."""
    block = min(block, count)
    number = -(-count // block)
    starts = np.random.default_rng(seed).integers(0, count - block + 1, size=(resamples, number))
    return (starts[:, :, None] + np.arange(block)).reshape(resamples, number * block)[:, :count]
