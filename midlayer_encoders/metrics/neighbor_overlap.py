"""Neighbor overlap: the share of a text's nearest texts that two layers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import full_precision, precise, result_dtype, unit_rows
from midlayer_encoders.metrics._sample_metric import PairMetric, check_pair
from midlayer_encoders.validation import check_choice

Distance: TypeAlias = Literal["cosine", "euclidean"]


def neighbor_overlap(first: Tensor, second: Tensor, *, k: int = 10, distance: Distance = "cosine") -> Tensor:
    r"""Return the mean share of each text's k nearest texts that two sets of vectors have in common.

    .. math::
        \frac{1}{N k} \sum_i \bigl| \mathcal{N}_k^X(i) \cap \mathcal{N}_k^Y(i) \bigr|

    (Doimo et al., 2020). Of texts at the same distance, the first one counts as nearest.

    Args:
        first: one row per text, shape ``(N, D)``, more than ``k`` texts.
        second: rows of the same texts, shape ``(N, E)``.
        k: number of neighbors, 1 or more.
        distance: ``"cosine"``, in which a zero vector has cosine 0 with all others, or ``"euclidean"``.

    Returns:
        Scalar, between ``0`` and ``1``; ``k / (N - 1)`` for independent vectors. NaN if the rows hold NaN or
        infinity.

    Example:
        >>> rows = torch.eye(4) + torch.arange(4.0)
        >>> neighbor_overlap(rows, 2 * rows, k=1)
        tensor(1.)
    """
    _check_options(k, distance)
    check_pair(first, second, least=k + 1)
    near = _neighbors(precise(first), k, distance) & _neighbors(precise(second), k, distance)
    share = near.sum().double() / (len(first) * k)
    return torch.where(torch.isfinite(first.sum() + second.sum()), share, torch.nan).to(result_dtype(first))


def _neighbors(rows: Tensor, k: int, distance: Distance) -> Tensor:
    """Return True where text j is among the k nearest of text i, shape ``(N, N)``."""
    rows = unit_rows(rows) if distance == "cosine" else rows - rows.mean(dim=0)
    with full_precision(rows.device):
        far = -(rows @ rows.mT) if distance == "cosine" else torch.cdist(rows, rows)
    far.fill_diagonal_(torch.inf)
    order = far.argsort(dim=-1, stable=True)[:, :k]
    return torch.zeros_like(far, dtype=torch.bool).scatter_(1, order, True)


def _check_options(k: int, distance: str) -> None:
    if k < 1:
        raise OptionError(f"`k` must be 1 or more, but got {k}.")
    check_choice("distance", distance, get_args(Distance))


class NeighborOverlap(PairMetric, function=neighbor_overlap, check=_check_options, number=neighbor_overlap):
    """:func:`neighbor_overlap` between each layer's vectors and those of the previous layer, or of one fixed layer.

    Options are those of the function and of :class:`PairMetric`. The value depends on the number of texts.
    """

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.least = int(self.options["k"]) + 1
