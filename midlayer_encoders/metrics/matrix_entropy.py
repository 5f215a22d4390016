"""Matrix-based entropy of a set of rows, its normalizations, and the entropy of all tokens of a corpus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import precise, result_dtype, token_gram
from midlayer_encoders.metrics._layer_metric import Kind
from midlayer_encoders.metrics._row_metric import MomentMetric, Moments
from midlayer_encoders.metrics._token_metric import all_real, check_tokens, parts
from midlayer_encoders.spectra import Method, spectral_entropy
from midlayer_encoders.validation import check_choice

Normalization: TypeAlias = Literal["raw", "maxEntropy", "logN", "logD", "logNlogD"]
"""What the entropy is divided by: 1, min(log N, log D), log N, log D, or log N log D."""


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
        method: how eigenvalues are found, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Shape ``(*)``, between ``0`` and ``log(min(N, D))`` when raw. ``0`` for a single row, and for rows that are all
        zero. NaN where the rows hold NaN or infinity.

    Example:
        >>> matrix_entropy(torch.eye(4))
        tensor(1.3863)
    """
    entropy = entropy_of(alpha, normalization, method)
    mask = all_real(states) if mask is None else mask
    gram, sizes = token_gram(states, mask, center=False, unit=False)
    return entropy(gram, sizes, mask.sum(dim=-1), states.shape[-1]).to(result_dtype(states))


def entropy_of(alpha: float, normalization: Normalization, method: Method) -> Callable[..., Tensor]:
    """Return :func:`entropy_of_gram` with these options, which are checked."""
    check_entropy_options(alpha, normalization)
    return partial(entropy_of_gram, alpha=alpha, normalization=normalization, method=method)


def entropy_of_moments(moments: Moments, *, entropy: Callable[..., Tensor]) -> Tensor:
    """Return the entropy of a set of rows, with the options of :func:`entropy_of`."""
    return entropy(moments.matrix, None, moments.count, moments.width)


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
    """Return the normalized entropy of Gram or moment matrices, shape ``(*)``; NaN where a matrix is not finite.

    Args:
        gram: shape ``(*, n, n)``.
        sizes: leading corners that count, shape ``(*)``.
        count: number of rows N behind each matrix, shape ``(*)``.
        width: their dimension D.
        alpha: order of the entropy.
        normalization: what it is divided by.
        method: how eigenvalues are found.
    """
    # Without a check nothing waits for a GPU, and one bad text, which gets NaN, does not take the others with it.
    entropy = spectral_entropy(gram, sizes, alpha=alpha, method=method, check=False)
    return normalized_entropy(entropy, count, width, normalization)


def normalized_entropy(entropy: Tensor, count: Tensor, width: int, normalization: Normalization) -> Tensor:
    """Return entropies of ``count`` rows of ``width`` numbers, both ``(*)``, divided by what ``normalization`` says."""
    if normalization == "raw":
        return entropy
    scale = _scale(count.to(entropy), width, normalization)
    # One row, or one dimension, has entropy 0 (or NaN, which is kept) and nothing to divide it by.
    return torch.where(scale > 0, entropy / scale, 0.0 * entropy)


def _scale(count: Tensor, width: int, normalization: Normalization) -> Tensor:
    log_n = count.clamp(min=1).log()
    log_d = torch.full_like(log_n, width).log()
    if normalization == "maxEntropy":
        return torch.minimum(log_n, log_d)
    return {"logN": log_n, "logD": log_d, "logNlogD": log_n * log_d}[normalization]


def check_entropy_options(alpha: float, normalization: str) -> None:
    """Raise an :class:`OptionError` for an order or a normalization that does not exist."""
    if not alpha > 0:
        raise OptionError(f"`alpha` must be greater than 0 (1 is the von Neumann entropy), but got {alpha}.")
    check_choice("normalization", normalization, get_args(Normalization))


class MatrixEntropy(MomentMetric):
    """Matrix entropy, per layer, of the tokens of all texts taken as one set of rows.

    Where :class:`PromptEntropy` reads one text at a time and :class:`DatasetEntropy` one vector per text, this reads
    every token of the corpus. Keeps one D x D matrix per layer in float64; no token states. Options are those of
    :func:`matrix_entropy`, N being the tokens of all texts; the rest as in :class:`LayerMetric`.

    Example:
        >>> metric = MatrixEntropy(layers=[0])
        >>> metric.update(0, torch.eye(4)[None], torch.ones(1, 4, dtype=torch.bool))
        >>> metric.compute()
        tensor([1.3863], dtype=torch.float64)
    """

    kind: ClassVar[Kind] = "tokens"

    def __init__(
        self,
        layers: Sequence[int],
        *,
        alpha: float = 1.0,
        normalization: Normalization = "raw",
        method: Method = "auto",
        **torchmetrics_options: Any,
    ) -> None:
        entropy = partial(entropy_of_moments, entropy=entropy_of(alpha, normalization, method))
        super().__init__(layers, entropy, center=False, unit=False, **torchmetrics_options)

    def update(self, layer: int, states: Tensor, mask: Tensor, *, index: Tensor | None = None) -> None:  # noqa: ARG002
        """Add one layer's token states of a batch, ``(B, T, D)``, and their mask ``(B, T)``; ``index`` is ignored."""
        check_tokens(states, mask)
        self._position(layer)
        for some, real in parts(states, mask, states.shape[1] * states.shape[2]):
            self._fold(layer, precise(torch.where(real.unsqueeze(-1), some, 0.0)).flatten(0, 1), real.sum())
