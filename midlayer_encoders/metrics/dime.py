"""DiME: the difference of matrix entropies between shuffled and true pairs of views."""

from __future__ import annotations

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
    is a kernel measure of the views' dependence (Skean et al., 2023).

    Args:
        first: one view of each text, shape ``(N, D)``, two texts or more.
        second: another view of the same texts, shape ``(N, E)``.
        alpha: order of the entropy, ``> 0``; with ``2`` no eigenvalues are needed.
        permutations: number of random permutations.
        seed: seed of the permutations.
        unit: scale vectors to unit length, so that each kernel has a diagonal of ones, as matrix entropy assumes.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Scalar, at most ``log(N)``; 0 for independent views, and negative if a permutation fits better than the true
        pairs. NaN if the views hold NaN or infinity.

    Example:
        >>> dime(torch.ones(4, 2), torch.eye(4))  # one view is the same for every text
        tensor(0.)
    """
    _check_options(alpha, permutations)
    check_pair(first, second)
    number = _dime(first, second, alpha=alpha, permutations=permutations, seed=seed, unit=unit, method=method)
    return number.to(result_dtype(first))


def _dime(
    first: Tensor, second: Tensor, *, alpha: float, permutations: int, seed: int, unit: bool, method: Method
) -> Tensor:
    """Return the difference of entropies of two views, each ``(*, N, D)``: shape ``(*)``."""
    orders = _orders(first.shape[-2], permutations, seed).to(first.device, non_blocking=True)
    shuffled = _kernel(second, unit)[..., orders[:, :, None], orders[:, None, :]]
    entropies = spectral_entropy(_kernel(first, unit).unsqueeze(-3) * shuffled, alpha=alpha, method=method, check=False)
    return entropies[..., 1:].mean(dim=-1) - entropies[..., 0]


def _kernel(rows: Tensor, unit: bool) -> Tensor:
    rows = unit_rows(precise(rows)) if unit else precise(rows)
    with full_precision(rows.device):
        return rows @ rows.mT


def _orders(count: int, permutations: int, seed: int) -> Tensor:
    """Return the identity and then random permutations, shape ``(1 + permutations, count)``."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = [torch.randperm(count, generator=generator) for _ in range(permutations)]
    return torch.stack([torch.arange(count), *shuffled])


def _check_options(alpha: float, permutations: int) -> None:
    if not alpha > 0:
        raise OptionError(f"`alpha` must be greater than 0, but got {alpha}.")
    if permutations < 1:
        raise OptionError(f"`permutations` must be 1 or more, but got {permutations}.")


class DiME(ViewMetric, function=dime, check=_check_options, number=_dime):
    """:func:`dime` of views 0 and 1 of each text, per layer.

    The most expensive metric: it finds ``permutations + 1`` spectra of the sample's size per layer. Options are those
    of the function and of :class:`SampleMetric`; both use ``seed``.
    """

    def _temporaries(self, views: int, texts: int) -> int:  # noqa: ARG002
        return (int(self.options["permutations"]) + 1) * texts**2
