"""Prompt entropy: how many directions the tokens of one text spread over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.metrics._gram import kernels_run, result_dtype, token_gram
from midlayer_encoders.metrics._token_metric import WaitingTokenMetric, all_real
from midlayer_encoders.metrics.matrix_entropy import Normalization, entropy_of
from midlayer_encoders.spectra import Method


def prompt_entropy(
    states: Tensor,
    mask: Tensor | None = None,
    *,
    alpha: float = 1.0,
    normalization: Normalization = "raw",
    center: bool = True,
    unit: bool = True,
    method: Method = "auto",
) -> Tensor:
    r"""Return the matrix entropy of each text's tokens, in nats, after centering them and scaling them to unit length.

    .. math::
        S_\alpha(\hat Z), \qquad \hat z_t = \frac{z_t - \bar z}{\lVert z_t - \bar z \rVert}

    with :math:`S_\alpha` of :func:`matrix_entropy`. Centering and scaling follow Wei et al. (2024), as the paper does.

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all. Padding may be anywhere.
        alpha: order, ``> 0``.
        normalization: see :func:`matrix_entropy`; N is the number of real tokens.
        center: subtract the mean of the text's tokens.
        unit: scale each token to unit length. Without ``center`` and ``unit`` the entropy is of the raw states.
        method: how eigenvalues are found, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Shape ``(*)``, between ``0`` and ``log(min(T - 1, D))`` when raw and centered. ``0`` for fewer than two tokens
        and for tokens that are all the same. NaN where the states hold NaN or infinity.

    Example:
        >>> import torch
        >>> prompt_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]))
        tensor(0.6931)
    """
    entropy = entropy_of(alpha, normalization, method)
    mask = all_real(states) if mask is None else mask
    return entropy(*_grams(states, mask, center, unit, alpha), states.shape[-1]).to(result_dtype(states))


def _grams(states: Tensor, mask: Tensor, center: bool, unit: bool, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each text's Gram or moment matrix, how many rows of it count, and the number of tokens behind it."""
    # A low order makes the rounding of small eigenvalues count.
    gram, sizes = token_gram(states.double() if alpha < 1 else states, mask, center=center, unit=unit)
    if sizes is not None:
        return gram, sizes, sizes
    count = mask.sum(dim=-1)
    return gram, torch.full_like(count, gram.shape[-1]), count


class PromptEntropy(WaitingTokenMetric):
    """Mean over texts of :func:`prompt_entropy`, per layer.

    Texts of fewer than two tokens are left out and counted in ``skipped``. Options are those of the function;
    ``layers`` and ``torchmetrics_options`` as in :class:`LayerMetric`.
    """

    _together: ClassVar[int] = 2**27  # as much as the spectra's kernels take at a time

    def __init__(
        self,
        layers: Sequence[int],
        *,
        alpha: float = 1.0,
        normalization: Normalization = "raw",
        center: bool = True,
        unit: bool = True,
        method: Method = "auto",
        **torchmetrics_options: Any,
    ) -> None:
        super().__init__(layers, **torchmetrics_options)
        self._entropy = entropy_of(alpha, normalization, method)
        self.center, self.unit, self.alpha = center, unit, alpha

    def _numbers(self, states: Tensor) -> int:
        tokens, width = states.shape[1:]
        in_place = self.alpha >= 1 and tokens <= width and kernels_run(states)
        return tokens * (tokens if in_place else width)

    def _ingredients(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return _grams(states, mask, self.center, self.unit, self.alpha)

    def _settled(self, ingredients: tuple[Tensor, ...], width: int) -> tuple[Tensor, Tensor]:
        gram, sizes, count = ingredients
        return self._entropy(gram, sizes, count, width), count >= 2
