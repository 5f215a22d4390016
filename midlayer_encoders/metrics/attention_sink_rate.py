"""Attention sink rate: the share of a layer's heads that attend mostly to the first token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import result_dtype
from midlayer_encoders.metrics._layer_metric import Kind
from midlayer_encoders.metrics._token_metric import MeanOverTexts


def attention_sink_rate(attentions: Tensor, mask: Tensor | None = None, *, epsilon: float = 0.3) -> Tensor:
    r"""Return the share of heads whose mean attention to the first token is above a threshold.

    .. math::
        \frac{1}{H} \sum_h \mathbb{1}\Bigl[\frac{1}{T} \sum_t A_{h,t,1} > \epsilon\Bigr]

    (Gu et al., 2025, "When Attention Sink Emerges in Language Models"; by layer in arXiv 2510.06477.) It reads
    attention weights; :func:`first_token_share` reads states.

    Args:
        attentions: weights of one layer, a row per query, shape ``(*, H, T, T)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all. Only real queries count, and the first
            real token is the first token.
        epsilon: threshold, in ``[0, 1)``.

    Returns:
        Shape ``(*)``, between ``0`` and ``1``. NaN if there is no token or the weights hold NaN or infinity.

    Example:
        >>> sink, even = torch.tensor([[1.0, 0.0], [0.9, 0.1]]), torch.full((2, 2), 0.5)
        >>> attention_sink_rate(torch.stack([sink, even]), epsilon=0.6)
        tensor(0.5000)
    """
    _check_epsilon(epsilon)
    mask = attentions.new_ones(_mask_shape(attentions), dtype=torch.bool) if mask is None else mask
    _check_attentions(attentions, mask)
    first = mask.int().argmax(dim=-1)[..., None, None, None]
    to_first = attentions.take_along_dim(first, dim=-1).squeeze(-1)  # (*, H, T)
    total = torch.where(mask.unsqueeze(-2), to_first, 0.0).sum(dim=-1, dtype=torch.float64)
    score = total / mask.sum(dim=-1).unsqueeze(-1)
    rate = (score > epsilon).double().mean(dim=-1)
    return torch.where(torch.isfinite(score).all(dim=-1), rate, torch.nan).to(result_dtype(attentions))


def attention_sink_rates(model: nn.Module, inputs: Mapping[str, Tensor], *, epsilon: float = 0.3) -> dict[int, float]:
    """Return the mean :func:`attention_sink_rate` of a batch at every layer of a transformers model.

    Args:
        model: loaded with ``attn_implementation="eager"``, the only implementation that returns attention weights; in
            eval mode, because dropout changes them.
        inputs: tokenized batch, on the model's device.
        epsilon: as in :func:`attention_sink_rate`.

    Returns:
        By layer, from 1: the attention inside block k belongs to layer k, the output of that block.
    """
    if model.training:
        raise OptionError("`model` must be in eval mode, but is in training mode: call `model.eval()` first.")
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    if not attentions or any(weights is None for weights in attentions):
        raise OptionError(
            "`model` must return the attention weights of every block, but returns none: "
            'load it with `attn_implementation="eager"`.'
        )
    mask = inputs.get("attention_mask", torch.ones(_mask_shape(attentions[0]), device=attentions[0].device)).bool()
    metric = AttentionSinkRate(range(1, len(attentions) + 1), epsilon=epsilon).to(mask.device)
    for layer, weights in zip(metric.layers, attentions, strict=True):
        metric.update(layer, weights, mask)
    return dict(zip(metric.layers, metric.compute().tolist(), strict=True))


def _mask_shape(attentions: Tensor) -> torch.Size:
    return attentions.shape[:-3] + attentions.shape[-1:]


def _check_epsilon(epsilon: float) -> None:
    if not 0 <= epsilon < 1:
        raise OptionError(f"`epsilon` must be in [0, 1), but got {epsilon}.")


def _check_attentions(attentions: Tensor, mask: Tensor) -> None:
    square = attentions.ndim >= 3 and attentions.shape[-1] == attentions.shape[-2]
    if not square or mask.shape != _mask_shape(attentions) or mask.dtype != torch.bool:
        raise OptionError(
            "`attentions` must be (*, H, T, T) and `mask` (*, T) of bool, "
            f"but got {tuple(attentions.shape)} and {tuple(mask.shape)} of {mask.dtype}."
        )


class AttentionSinkRate(MeanOverTexts, function=attention_sink_rate, check=_check_epsilon):
    """Mean over texts of :func:`attention_sink_rate`, per layer.

    ``update`` takes attention weights, which the readers of this package do not provide, so ``"all"`` does not include
    this metric: see :func:`attention_sink_rates`. Texts without a token are excluded and counted in ``skipped``.
    Options are those of the function.
    """

    kind: ClassVar[Kind] = "attentions"

    def update(self, layer: int, attentions: Tensor, mask: Tensor, *, index: Tensor | None = None) -> None:  # noqa: ARG002
        """Add one layer's attention weights of a batch, ``(B, H, T, T)``, and the mask ``(B, T)``."""
        row = self._position(layer)
        self._add(row, attention_sink_rate(attentions, mask, **self.options), mask.any(dim=-1))
