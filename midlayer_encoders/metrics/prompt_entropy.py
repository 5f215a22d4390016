"""Prompt entropy: how many directions the tokens of one text spread over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.metrics._gram import token_gram
from midlayer_encoders.metrics._kernels import kernels_run
from midlayer_encoders.metrics._precision import result_dtype
from midlayer_encoders.metrics._token_metric import TokenMetric, all_real, check_tokens, parts
from midlayer_encoders.metrics.matrix_entropy import Normalization, check_entropy_options, entropy_of_gram
from midlayer_encoders.spectra import Method

__all__ = ["PromptEntropy", "prompt_entropy"]


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
    r"""Return the matrix entropy of each text's tokens, in nats, after centring them and scaling them to unit length.

    .. math::
        S_\alpha(\hat Z), \qquad \hat z_t = \frac{z_t - \bar z}{\lVert z_t - \bar z \rVert}

    with :math:`S_\alpha` of :func:`matrix_entropy`. Centring and scaling follow Wei et al. (2024), as the paper does.

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all. Padding may stand anywhere.
        alpha: order, ``> 0``.
        normalization: see :func:`matrix_entropy`; N is the number of real tokens.
        center: subtract the mean of the text's tokens.
        unit: scale each token to unit length. Without ``center`` and ``unit`` the entropy is of the raw states.
        method: how eigenvalues are found, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Shape ``(*)``, between ``0`` and ``log(min(T - 1, D))`` when raw and centred. ``0`` for fewer than two tokens
        and for tokens that are all the same. NaN where the states hold NaN or infinity.

    Example:
        >>> import torch
        >>> prompt_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]))
        tensor(0.6931)
    """
    check_entropy_options(alpha, normalization)
    mask = all_real(states) if mask is None else mask
    entropy = _entropies(states, mask, center, unit, alpha=alpha, normalization=normalization, method=method)
    return entropy.to(result_dtype(states))


def _entropies(
    states: Tensor,
    mask: Tensor,
    center: bool,
    unit: bool,
    *,
    alpha: float,
    normalization: Normalization,
    method: Method,
) -> Tensor:
    # A low order makes the rounding of small eigenvalues count.
    gram, sizes = token_gram(states.double() if alpha < 1 else states, mask, center=center, unit=unit)
    count, width = mask.sum(dim=-1), states.shape[-1]
    return entropy_of_gram(gram, sizes, count, width, alpha=alpha, normalization=normalization, method=method)


_TOGETHER = 2**24
"""How many numbers of Gram matrices are found the spectrum of at once on a GPU: 64 MB in float32."""


@dataclass(frozen=True)
class _Waiting:
    """Gram matrices of one layer and batch whose entropies are still to be found."""

    row: int
    gram: Tensor
    sizes: Tensor
    count: Tensor
    width: int


class PromptEntropy(TokenMetric):
    """Mean over texts of :func:`prompt_entropy`, per layer.

    Texts of fewer than two tokens are left out and counted in ``skipped``.

    Args:
        layers: layer numbers that ``update`` will name.
        alpha: order of the entropy, ``> 0``.
        normalization: ``"raw"``, ``"maxEntropy"``, ``"logN"``, ``"logD"`` or ``"logNlogD"``.
        center: subtract the mean of the text's tokens.
        unit: scale each token to unit length.
        method: how eigenvalues are found.
        torchmetrics_options: torchmetrics' own.
    """

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
        check_entropy_options(alpha, normalization)
        self.alpha, self.normalization, self.method = alpha, normalization, method
        self.center, self.unit = center, unit
        self._waiting: list[_Waiting] = []

    def update(self, layer: int, states: Tensor, mask: Tensor) -> None:
        """Add one layer's token states of a batch; on a GPU their Gram matrices wait for those of the next layers.

        A GPU is not full with the small matrices of one layer, and every launch costs the same, so that several layers
        at once take a good part less (benchmarks/results/metrics_h200.md). 64 MB of matrices wait at the most.

        Args:
            layer: one of ``layers``.
            states: shape ``(B, T, D)``.
            mask: which tokens are real, shape ``(B, T)``, bool; padding may stand on either side.
        """
        if not self._waits(states):
            super().update(layer, states, mask)
            return
        check_tokens(states, mask)
        row = self._position(layer)
        for some, real in parts(states, mask, self._numbers(states)):
            gram, sizes = token_gram(some, real, center=self.center, unit=self.unit)
            count = real.sum(dim=-1)
            sizes = torch.full_like(count, gram.shape[-1]) if sizes is None else sizes
            if self._waiting and self._waiting[0].gram.shape[-1] != gram.shape[-1]:
                self._settle()
            self._waiting.append(_Waiting(row, gram, sizes, count, some.shape[-1]))
            if sum(waiting.gram.numel() for waiting in self._waiting) >= _TOGETHER:
                self._settle()

    def _waits(self, states: Tensor) -> bool:
        return states.is_cuda and self.alpha >= 1

    def _settle(self) -> None:
        """Add what waits to the sums."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        width, count = waiting[0].width, torch.cat([one.count for one in waiting])
        rows = [(one.row, len(one.count)) for one in waiting]
        sizes = torch.cat([one.sizes for one in waiting])
        gram = torch.cat([one.gram for one in waiting])
        del waiting
        entropy = entropy_of_gram(
            gram, sizes, count, width, alpha=self.alpha, normalization=self.normalization,
            method=self.method,
        )  # fmt: skip
        texts = [number for _, number in rows]
        for (row, _), values, tokens in zip(rows, torch.split(entropy, texts), torch.split(count, texts), strict=True):
            self._add(row, values, tokens >= 2)

    def compute(self) -> Tensor:
        """Return the mean entropy per layer, shape ``(len(layers),)``, float64."""
        self._settle()
        return super().compute()

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super()._sync_dist(*args, **kwargs)

    def reset(self) -> None:
        """Forget all texts."""
        super().reset()
        self._waiting = []

    def _numbers(self, states: Tensor) -> int:
        tokens, width = states.shape[1:]
        in_place = self.alpha >= 1 and tokens <= width and kernels_run(states)
        return tokens * (tokens if in_place else width)

    def _per_text(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        entropy = _entropies(
            states,
            mask,
            self.center,
            self.unit,
            alpha=self.alpha,
            normalization=self.normalization,
            method=self.method,
        )
        return entropy, mask.sum(dim=-1) >= 2
