"""DiME: how much more the two views of a text agree than those of different texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import full_precision, precise, result_dtype, unit_rows
from midlayer_encoders.metrics._sample_metric import ViewMetric, check_pair
from midlayer_encoders.spectra import Method, spectral_entropy


def dime(
    first: Tensor,
    second: Tensor,
    *,
    alpha: float = 1.0,
    permutations: int = 10,
    seed: int = 0,
    unit: bool = True,
    method: Method = "auto",
) -> Tensor:
    r"""Return the difference of matrix entropies of two views of each text, in nats.

    .. math::
        \mathbb{E}_\Pi\, S_\alpha(K_x \circ \Pi K_y \Pi^\top) - S_\alpha(K_x \circ K_y)

    with :math:`K_x = X X^\top`, :math:`\circ` the elementwise product and :math:`\Pi` a random permutation of texts. It
    is a kernel measure of the views' dependence. (Skean et al., 2023.)

    Args:
        first: one view of each text, shape ``(N, D)``, two texts or more.
        second: another view of the same texts, shape ``(N, E)``.
        alpha: order of the entropy, ``> 0``; with ``2`` no eigenvalues are needed.
        permutations: how many random permutations the mean is over.
        seed: of the permutations.
        unit: scale vectors to unit length, so that each kernel has a diagonal of ones, as matrix entropy supposes.
        method: how eigenvalues are found, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Scalar, at most ``log(N)``; 0 where the views tell nothing of each other, and below where a permutation fits
        better than the truth. NaN where the views hold NaN or infinity.

    Example:
        >>> dime(torch.ones(4, 2), torch.eye(4))  # one view is the same for every text
        tensor(0.)
    """
    _check_options(alpha, permutations)
    check_pair(first, second)
    found = _dime(first, second, alpha=alpha, permutations=permutations, seed=seed, unit=unit, method=method)
    return found.to(result_dtype(first))


def _dime(
    first: Tensor, second: Tensor, *, alpha: float, permutations: int, seed: int, unit: bool, method: Method
) -> Tensor:
    """Return the difference of entropies of views of several layers, each ``(*, N, D)``: shape ``(*)``."""
    kernels = _kernel(first, unit), _kernel(second, unit)
    orders = _orders(first.shape[-2], permutations, seed).to(first.device, non_blocking=True)
    shuffled = kernels[1][..., orders[:, :, None], orders[:, None, :]]
    entropies = spectral_entropy(kernels[0].unsqueeze(-3) * shuffled, alpha=alpha, method=method, check=False)
    return entropies[..., 1:].mean(dim=-1) - entropies[..., 0]


def _kernel(rows: Tensor, unit: bool) -> Tensor:
    rows = unit_rows(precise(rows)) if unit else precise(rows)
    with full_precision(rows.device):
        return rows @ rows.mT


def _orders(count: int, permutations: int, seed: int) -> Tensor:
    """Return the identity and then random permutations, shape ``(1 + permutations, count)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.arange(count)] + [torch.randperm(count, generator=generator) for _ in range(permutations)]
    )


def _check_options(alpha: float, permutations: int) -> None:
    if not alpha > 0:
        raise OptionError(f"`alpha` must be greater than 0, but got {alpha}.")
    if permutations < 1:
        raise OptionError(f"`permutations` must be 1 or more, but got {permutations}.")


class DiME(ViewMetric):
    """:func:`dime` of views 0 and 1 of each text, per layer.

    ``permutations + 1`` spectra of the sample's size are found per layer: the most costly of the metrics. Options are
    those of the function and of :class:`SampleMetric`; ``seed`` is for both.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        alpha: float = 1.0,
        permutations: int = 10,
        seed: int = 0,
        unit: bool = True,
        method: Method = "auto",
        **options: Any,
    ) -> None:
        _check_options(alpha, permutations)
        of = partial(_dime, alpha=alpha, permutations=permutations, seed=seed, unit=unit, method=method)
        super().__init__(layers, of, seed=seed, **options)
        self.permutations = permutations

    def _numbers(self, views: int, texts: int) -> int:  # noqa: ARG002
        return (self.permutations + 1) * texts**2
