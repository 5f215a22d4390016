"""CKA: the similarity of two sets of vectors of the same texts, up to rotation and scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import full_precision, lengths, precise, result_dtype, tiny_length
from midlayer_encoders.metrics._sample_metric import PairMetric, check_pair


def cka(first: Tensor, second: Tensor, *, unbiased: bool = False) -> Tensor:
    r"""Return the linear centered kernel alignment of two layers' or models' vectors of the same texts.

    .. math::
        \frac{\operatorname{HSIC}(K, L)}{\sqrt{\operatorname{HSIC}(K, K) \operatorname{HSIC}(L, L)}}, \qquad
        K = X X^\top, \; L = Y Y^\top, \; \operatorname{HSIC}(K, L) = \operatorname{tr}(K H L H)

    (Kornblith et al., 2019), or with the unbiased estimate of HSIC (Nguyen et al., 2021), which does not rise towards 1
    if there are fewer texts than dimensions.

    Args:
        first: one row per text, shape ``(N, D)``, two texts or more; four for ``unbiased``.
        second: rows of the same texts, shape ``(N, E)``.
        unbiased: use the unbiased estimate.

    Returns:
        Scalar, between ``0`` and ``1`` (unbiased: at most ``1``, may be below ``0``); ``0`` if either set is
        constant. NaN if the rows hold NaN or infinity.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> cka(rows, 3 * rows.flip(1) + 5)
        tensor(1.)
    """
    check_pair(first, second, least=4 if unbiased else 2)
    return cka_matrix(first[None], second[None], unbiased=unbiased)[0, 0]


def cka_matrix(first: Tensor, second: Tensor, *, unbiased: bool = False) -> Tensor:
    """Return the :func:`cka` of every layer of one model with every layer of another.

    Each layer's Gram matrix is computed once and stays in memory.

    Args:
        first: vectors of N texts at L layers, shape ``(L, N, D)``, two texts or more; four for ``unbiased``.
        second: vectors of the same texts at L' layers, shape ``(L', N, D')``.
        unbiased: use the unbiased estimate.

    Returns:
        Shape ``(L, L')``.

    Example:
        >>> layers = torch.stack([torch.eye(3), torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])])
        >>> cka_matrix(layers, layers)
        tensor([[1.0000, 0.7071],
                [0.7071, 1.0000]])
    """
    if first.ndim != 3 or second.ndim != 3 or first.shape[1] != second.shape[1]:
        raise OptionError(
            f"`first` and `second` must be (L, N, D) and (L', N, D') of the same N texts, "
            f"but got {tuple(first.shape)} and {tuple(second.shape)}."
        )
    hsic = _unbiased_hsic if unbiased else _hsic
    first_grams = [_centered_gram(precise(rows)) for rows in first]
    second_grams = [_centered_gram(precise(rows)) for rows in second]
    first_norms = torch.stack([hsic(gram, gram) for gram in first_grams])
    second_norms = torch.stack([hsic(gram, gram) for gram in second_grams])
    norms = torch.outer(first_norms, second_norms)
    cross = torch.stack([torch.stack([hsic(x, y) for y in second_grams]) for x in first_grams])
    # NaN is unequal to 0 and stays NaN.
    return torch.where(norms == 0, 0.0, cross / norms.sqrt()).to(result_dtype(first))


def _centered_gram(rows: Tensor) -> Tensor:
    constant = tiny_length(rows)
    rows = rows - rows.mean(dim=0)
    rows = torch.where((lengths(rows) <= constant).unsqueeze(-1), 0.0, rows)
    with full_precision(rows.device):
        gram = rows @ rows.mT
    # Only ratios matter: this scale keeps the sums of squares from overflow and underflow.
    trace = gram.trace()
    return gram / torch.where(trace == 0, 1.0, trace)


def _hsic(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum()


def _unbiased_hsic(first: Tensor, second: Tensor) -> Tensor:
    """Return HSIC without the bias of the diagonal (Song et al., 2012, equation 5), up to a factor that cancels."""
    n = len(first)
    first, second = (gram - torch.diag(gram.diagonal()) for gram in (first, second))
    sums = first.sum() * second.sum() / ((n - 1) * (n - 2))
    crossed = 2 * (first.sum(dim=0) * second.sum(dim=0)).sum() / (n - 2)
    return (first * second).sum() + sums - crossed


class CKA(PairMetric, function=cka, number=cka):
    """:func:`cka` between each layer's vectors and those of the previous layer, or of one fixed layer.

    For two models, call :func:`cka`. Options are those of the function and of :class:`PairMetric`.
    """

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.least = 4 if self.options["unbiased"] else 2
