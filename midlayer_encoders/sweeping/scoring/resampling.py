"""Scores on resampled test items, from values of the items that were computed once.

The resamples depend on the number of items only, so layers, recipes and models on the same task have paired resamples.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import csr_matrix
from scipy.special import xlogy
from torch import Tensor

RESAMPLES = 200
#: Fewer items are not resampled: with two or three, a third of all differences that are chance would look separable.
FEWEST_ITEMS = 10
_BLOCK = 1 << 22  # counts of a block of resamples: 32 MiB
_CONSTANT = 1e-12  # variance below it, of values with variance 1, is rounding


def resampled_counts(items: int) -> Iterator[Tensor]:
    """Yield how often each of N items occurs in each resample, in blocks ``(N, S)`` with N items per resample.

    A block without columns if there are fewer than :data:`FEWEST_ITEMS`.
    """
    if items < FEWEST_ITEMS:
        yield torch.zeros(items, 0, dtype=torch.float64)
        return
    generator = np.random.default_rng(items)
    for start in range(0, RESAMPLES, size := max(_BLOCK // max(items, 1), 1)):
        draws = (generator.integers(0, max(items, 1), items) for _ in range(min(size, RESAMPLES - start)))
        counts = [np.bincount(draw, minlength=items) for draw in draws]
        yield torch.from_numpy(np.stack(counts, axis=1).astype(np.float64))


def resampled_means(values: Tensor) -> Tensor:
    """Return the mean of resampled items, shape ``(L, S)``, from values of items ``(L, N)``, in float64."""
    sums = [values @ counts.to(values) for counts in resampled_counts(values.shape[1])]
    return torch.cat(sums, dim=1) / values.shape[1]


def correlations(values: Tensor, targets: Tensor) -> Tensor:
    """Return the correlation of values ``(L, N)`` with targets ``(N,)``, and that of resampled items, ``(L, 1 + S)``.

    NaN if one of them is constant.
    """
    x, y = _standardize(values), _standardize(targets[None])
    products = x, y, x * x, y * y, x * y
    blocks = []
    for counts in (torch.ones(x.shape[1], 1, dtype=torch.float64), *resampled_counts(x.shape[1])):
        mean_x, mean_y, mean_xx, mean_yy, mean_xy = (rows @ counts / len(counts) for rows in products)
        var_x, var_y = mean_xx - mean_x**2, mean_yy - mean_y**2
        defined = (var_x > _CONSTANT) & (var_y > _CONSTANT)
        blocks.append(torch.where(defined, (mean_xy - mean_x * mean_y) / (var_x * var_y).sqrt(), torch.nan))
    return torch.cat(blocks, dim=1).clamp(-1, 1)


def _standardize(rows: Tensor) -> Tensor:
    centered = rows - rows.mean(dim=1, keepdim=True)
    return centered / centered.square().mean(dim=1, keepdim=True).sqrt()


def resampled_precisions(similarities: Tensor, positive: Tensor) -> Tensor:
    """Return the average precision of pairs, shape ``(L, S)``, from similarities ``(L, P)`` and labels ``(P,)``."""
    positive = positive.to(similarities.device)
    blocks = []
    for counts in resampled_counts(len(positive)):
        counts = counts.to(similarities.device, torch.float32)  # exact up to 2 ** 24 items
        precisions = []
        for layer in similarities:
            values, order = layer.sort(descending=True, stable=True)
            # Equal similarities share a threshold: the precision at the last of them counts for each.
            _, group, sizes = torch.unique_consecutive(values, return_inverse=True, return_counts=True)
            hits = positive[order].nonzero()[:, 0]
            last = (sizes.cumsum(dim=0) - 1)[group[hits]]
            ordered = counts[order]
            positives = (ordered * positive[order, None]).cumsum(dim=0)
            precision = positives[last] / ordered.cumsum(dim=0)[last].clamp(min=1)
            precisions.append((ordered[hits] * precision).sum(dim=0) / positives[-1])
        blocks.append(torch.stack(precisions))
    return torch.cat(blocks, dim=1)


def v_measures(labels: Tensor, clusters: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    r"""Return the mean V-measure :math:`2 I(Y; C) / (H(Y) + H(C))` of draws, and of resampled texts, ``(L, 1 + S)``.

    The clusters of resampled texts stay the same.

    Args:
        labels: from 0, shape ``(R, S)``.
        clusters: from 0, at each layer, shape ``(L, R, S)``.
        rows: text of each place of a draw, shape ``(R, S)``.
        num_rows: number of texts.
    """
    truth, places = labels.cpu().numpy(), rows.cpu().numpy()
    blocks = []
    for counts in (torch.ones(num_rows, 1, dtype=torch.float64), *resampled_counts(num_rows)):
        by_label = [_entropy(y, at, counts.numpy()) for y, at in zip(truth, places, strict=True)]
        layers = []
        for layer in clusters.cpu().numpy():
            by_cluster = [_entropy(c, at, counts.numpy()) for c, at in zip(layer, places, strict=True)]
            cells = truth * (layer.max() + 1) + layer
            both = [_entropy(cell, at, counts.numpy()) for cell, at in zip(cells, places, strict=True)]
            total = np.add(by_label, by_cluster)
            shared = np.maximum(total - both, 0)
            layers.append(np.where(total > 0, 2 * shared / np.where(total > 0, total, 1), 1).mean(axis=0))
        blocks.append(torch.from_numpy(np.stack(layers)))
    return torch.cat(blocks, dim=1)


def _entropy(codes: npt.NDArray[Any], rows: npt.NDArray[Any], counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the entropy of codes in each resample of rows, shape ``(S,)``."""
    names, numbers = np.unique(codes, return_inverse=True)
    table = csr_matrix((np.ones(len(rows)), (numbers, rows)), shape=(len(names), len(counts))) @ counts
    shares = table / np.maximum(table.sum(axis=0), 1)
    return np.asarray(-xlogy(shares, shares).sum(axis=0))
