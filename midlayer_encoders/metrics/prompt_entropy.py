"""Prompt entropy: the matrix entropy of the tokens of one text."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from midlayer_encoders.metrics._gram import kernels_can_read, result_dtype, token_gram
from midlayer_encoders.metrics._token_metric import WaitingTokenMetric, all_real
from midlayer_encoders.metrics.matrix_entropy import Normalization, check_entropy_options, entropy_of_gram
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

    with :math:`S_\alpha` of :func:`matrix_entropy`. Centering and scaling follow Wei et al. (2024), as in the paper.

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all. Padding may be anywhere.
        alpha: order, ``> 0``.
        normalization: see :func:`matrix_entropy`; N is the number of real tokens.
        center: subtract the mean of the text's tokens.
        unit: scale each token to unit length.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Shape ``(*)``, between ``0`` and ``log(min(T - 1, D))`` if raw and centered. ``0`` for fewer than two tokens
        and for equal tokens. NaN if the states hold NaN or infinity.

    Example:
        >>> import torch
        >>> prompt_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]))
        tensor(0.6931)
    """
    check_entropy_options(alpha, normalization)
    mask = all_real(states) if mask is None else mask
    grams = _grams(states, mask, center, unit, alpha)
    entropy = entropy_of_gram(*grams, states.shape[-1], alpha=alpha, normalization=normalization, method=method)
    return entropy.to(result_dtype(states))


def _grams(states: Tensor, mask: Tensor, center: bool, unit: bool, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each text's Gram or moment matrix, the size of its valid corner, and the number of tokens."""
    # At a low order, the rounding of small eigenvalues matters.
    gram, sizes = token_gram(states.double() if alpha < 1 else states, mask, center=center, unit=unit)
    if sizes is not None:
        return gram, sizes, sizes
    count = mask.sum(dim=-1)
    return gram, torch.full_like(count, gram.shape[-1]), count


class PromptEntropy(WaitingTokenMetric, function=prompt_entropy, check=check_entropy_options):
    """Mean over texts of :func:`prompt_entropy`, per layer.

    Texts of fewer than two tokens are excluded and counted in ``skipped``. Options are those of the function.
    """

    _max_waiting_bytes: ClassVar[int] = 2**27  # the scratch memory of the spectra's kernels

    def _temporaries(self, states: Tensor) -> int:
        tokens, width = states.shape[1:]
        in_place = self.options["alpha"] >= 1 and tokens <= width and kernels_can_read(states)
        return tokens * (tokens if in_place else width)

    def _ingredients(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return _grams(states, mask, **{name: self.options[name] for name in ("center", "unit", "alpha")})

    def _settled(self, ingredients: tuple[Tensor, ...], width: int) -> tuple[Tensor, Tensor]:
        gram, sizes, count = ingredients
        options = {name: self.options[name] for name in ("alpha", "normalization", "method")}
        return entropy_of_gram(gram, sizes, count, width, **options), count >= 2
