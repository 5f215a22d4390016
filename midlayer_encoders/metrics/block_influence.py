"""Block influence: how much a block turns the states that pass through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import lengths, result_dtype, single_or_better
from midlayer_encoders.metrics._token_metric import MeanOverTexts, all_real, check_tokens, parts


def block_influence(before: Tensor, after: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return one minus the mean cosine between each token before and after a block (ShortGPT, Men et al., 2024).

    .. math::
        1 - \frac{1}{T} \sum_t \cos(z_t^{\text{before}}, z_t^{\text{after}})

    Args:
        before: token states that go in, shape ``(*, T, D)``.
        after: token states that come out, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all.

    Returns:
        Shape ``(*)``, between ``0`` (direction unchanged) and ``2``. Tokens that are zero on either side are skipped;
        NaN where none is left, and where the states hold NaN or infinity.

    Example:
        >>> block_influence(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
        tensor(0.5000)
    """
    total, count = _turns(single_or_better(before), single_or_better(after), all_real(after) if mask is None else mask)
    return (total / count).to(result_dtype(after))


def _turns(before: Tensor, after: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of one minus cosine over each text's tokens, and their number, both ``(*)``."""
    scale = lengths(before).double() * lengths(after).double()
    counts = mask & (scale != 0)
    cosine = (before * after).sum(dim=-1).double() / scale
    return torch.where(counts, 1.0 - cosine, 0.0).sum(dim=-1), counts.sum(dim=-1)


class BlockInfluence(MeanOverTexts):
    """Mean over texts of :func:`block_influence` between each layer and the one listed before it.

    Within a batch the layers must come in the order of ``layers``; the states of the layer before are kept for that
    batch only. The first layer has nothing before it: its value is NaN, always. With all layers listed, the value at
    layer k is the influence of block k. ``forward`` is refused; arguments as in :class:`LayerMetric`.
    """

    needs_previous = True
    _compares = "two layers"

    def __init__(self, layers: Sequence[int], **torchmetrics_options: Any) -> None:
        super().__init__(layers, **torchmetrics_options)
        self._before: tuple[int, Tensor] | None = None

    def update(self, layer: int, states: Tensor, mask: Tensor, *, index: Tensor | None = None) -> None:  # noqa: ARG002
        """Add one layer's token states ``(B, T, D)`` of a batch, after those of the layer listed before it."""
        check_tokens(states, mask)
        row = self._position(layer)
        before, self._before = self._before, (row, states.detach()) if row + 1 < len(self.layers) else None
        if row == 0:
            return
        if before is None or before[0] != row - 1 or before[1].shape != states.shape:
            self._before = None
            raise OptionError(
                f"`layer` {layer} must follow layer {self.layers[row - 1]} of the same batch: "
                f"update the layers in the order {list(self.layers)}, batch by batch."
            )
        numbers = states.shape[1] * states.shape[2]
        for (earlier, real), (later, _) in zip(
            parts(before[1], mask, numbers), parts(states, mask, numbers), strict=True
        ):
            total, count = _turns(single_or_better(earlier), single_or_better(later), real)
            self._add(row, total / count, count > 0)

    def reset(self) -> None:
        """Forget all texts, and the batch in flight."""
        super().reset()
        self._before = None
