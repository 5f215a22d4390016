"""Matrix-based entropy of a set of rows, its normalizations, and the entropy of all tokens of a corpus."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import precise, result_dtype, token_gram
from midlayer_encoders.metrics._layer_metric import Kind
from midlayer_encoders.metrics._row_metric import MomentMetric, Moments
from midlayer_encoders.metrics._token_metric import all_real, check_tokens, chunks
from midlayer_encoders.spectra import Method, spectral_entropy
from midlayer_encoders.validation import check_choice

Normalization: TypeAlias = Literal["raw", "maxEntropy", "logN", "logD", "logNlogD"]
"""Divisor of the entropy: 1, min(log N, log D), log N, log D, or log N log D."""


def matrix_entropy(
    states: Tensor,
    alpha: float = 1.0,
    *,
    mask: Tensor | None = None,
    normalization: Normalization = "raw",
    method: Method = "auto",
) -> Tensor:
    r"""Return the matrix-based Rényi entropy of each set of states, in nats.

    .. math::
        S_\alpha(Z) = \frac{1}{1-\alpha} \log \sum_i p_i^\alpha, \qquad
        p_i = \lambda_i(Z Z^\top) / \operatorname{tr}(Z Z^\top)

    Args:
        states: rows to compare, shape ``(*, N, D)``.
        alpha: order, ``> 0``; ``1`` is the limit :math:`-\sum_i p_i \log p_i`; ``2`` needs no eigenvalues.
        mask: which rows are real, shape ``(*, N)``, bool; ``None`` for all.
        normalization: ``"raw"``, or divided by ``"maxEntropy"`` (the smaller of log N and log D), ``"logN"``,
            ``"logD"``, or ``"logNlogD"`` (their product); N counts real rows.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Shape ``(*)``, between ``0`` and ``log(min(N, D))`` when raw. ``0`` for a single row and for zero rows. NaN if
        the rows hold NaN or infinity.

    Example:
        >>> matrix_entropy(torch.eye(4))
        tensor(1.3863)
    """
    check_entropy_options(alpha, normalization)
    mask = all_real(states) if mask is None else mask
    gram, sizes = token_gram(states, mask, center=False, unit=False)
    entropy = entropy_of_gram(
        gram, sizes, mask.sum(dim=-1), states.shape[-1], alpha=alpha, normalization=normalization, method=method
    )
    return entropy.to(result_dtype(states))


def entropy_of_moments(moments: Moments, **options: Any) -> Tensor:
    """Return the entropy of sets of rows, shape ``(*)``, with the options of :func:`entropy_of_gram`."""
    return entropy_of_gram(moments.matrix, None, moments.count, moments.width, **options)


def entropy_of_gram(
    gram: Tensor,
    sizes: Tensor | None,
    count: Tensor,
    width: int,
    *,
    alpha: float,
    normalization: Normalization,
    method: Method,
) -> Tensor:
    """Return the normalized entropy of Gram or moment matrices, shape ``(*)``; NaN if a matrix is not finite.

    Args:
        gram: shape ``(*, n, n)``.
        sizes: sizes of the leading corners, shape ``(*)``; ``None`` for whole matrices.
        count: number of rows N of each set, shape ``(*)``.
        width: their dimension D.
        alpha: order of the entropy.
        normalization: divisor of the entropy.
        method: eigenvalue method.
    """
    # Without the check, nothing waits for a GPU and one NaN text does not stop the others.
    entropy = spectral_entropy(gram, sizes, alpha=alpha, method=method, check=False)
    return normalized_entropy(entropy, count, width, normalization)


def normalized_entropy(entropy: Tensor, count: Tensor, width: int, normalization: Normalization) -> Tensor:
    """Return normalized entropies of ``count`` rows of ``width`` numbers, shape ``(*)``."""
    if normalization == "raw":
        return entropy
    scale = _scale(count.to(entropy), width, normalization)
    # One row, or one dimension, has entropy 0 (or NaN, which stays NaN) and the divisor 0.
    return torch.where(scale > 0, entropy / scale, 0.0 * entropy)


def _scale(count: Tensor, width: int, normalization: Normalization) -> Tensor:
    log_n = count.clamp(min=1).log()
    log_d = torch.full_like(log_n, width).log()
    if normalization == "maxEntropy":
        return torch.minimum(log_n, log_d)
    return {"logN": log_n, "logD": log_d, "logNlogD": log_n * log_d}[normalization]


def check_entropy_options(alpha: float, normalization: str) -> None:
    """Raise an :class:`OptionError` for an invalid order or normalization."""
    if not alpha > 0:
        raise OptionError(f"`alpha` must be greater than 0 (1 is the von Neumann entropy), but got {alpha}.")
    check_choice("normalization", normalization, get_args(Normalization))


class MatrixEntropy(MomentMetric, function=matrix_entropy, check=check_entropy_options, number=entropy_of_moments):
    """Matrix entropy, per layer, of the tokens of all texts as one set of rows.

    :class:`PromptEntropy` reads one text at a time and :class:`DatasetEntropy` one vector per text; this metric reads
    all tokens of the corpus. It stores one D x D float64 matrix per layer and no token states. Options are those of
    :func:`matrix_entropy`, where N counts the tokens of all texts.

    Example:
        >>> metric = MatrixEntropy(layers=[0])
        >>> metric.update(0, torch.eye(4)[None], torch.ones(1, 4, dtype=torch.bool))
        >>> metric.compute()
        tensor([1.3863], dtype=torch.float64)
    """

    kind: ClassVar[Kind] = "tokens"

    def update(self, layer: int, states: Tensor, mask: Tensor, *, index: Tensor | None = None) -> None:  # noqa: ARG002
        """Add one layer's token states of a batch, ``(B, T, D)``, and their mask ``(B, T)``; ``index`` is ignored."""
        check_tokens(states, mask)
        self._position(layer)
        for chunk, real in chunks(states, mask):
            self._fold(layer, precise(torch.where(real.unsqueeze(-1), chunk, 0.0)).flatten(0, 1), real.sum())
