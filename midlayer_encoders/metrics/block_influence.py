"""Block influence: how far a block rotates the states that pass through it."""

from __future__ import annotations

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import lengths, result_dtype, single_or_better
from midlayer_encoders.metrics._token_metric import MeanOverTexts, all_real, check_tokens, chunks


def block_influence(before: Tensor, after: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Return one minus the mean cosine between each token before and after a block (ShortGPT, Men et al., 2024).

    .. math::
        1 - \frac{1}{T} \sum_t \cos(z_t^{\text{before}}, z_t^{\text{after}})

    Args:
        before: token states before the block, shape ``(*, T, D)``.
        after: token states after the block, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all.

    Returns:
        Shape ``(*)``, between ``0`` (direction unchanged) and ``2``. Tokens that are zero on either side are skipped;
        NaN if none is left or the states hold NaN or infinity.

    Example:
        >>> block_influence(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
        tensor(0.5000)
    """
    total, count = _rotations(
        single_or_better(before), single_or_better(after), all_real(after) if mask is None else mask
    )
    return (total / count).to(result_dtype(after))


def _rotations(before: Tensor, after: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of one minus cosine over each text's tokens, and their number, both ``(*)``."""
    scale = lengths(before).double() * lengths(after).double()
    counts = mask & (scale != 0)
    cosine = (before * after).sum(dim=-1).double() / scale
    return torch.where(counts, 1.0 - cosine, 0.0).sum(dim=-1), counts.sum(dim=-1)


class BlockInfluence(MeanOverTexts):
    """Mean over texts of :func:`block_influence` between each layer and the one listed before it.

    Within a batch, update the layers in the order of ``layers``; the previous layer's states are stored for that batch
    only. The first layer's value is always NaN. With all layers listed, the value at layer k is the influence of
    block k. ``forward`` raises.
    """

    needs_previous = True
    _compares = "two layers"

    _previous: tuple[int, Tensor] | None = None

    def update(self, layer: int, states: Tensor, mask: Tensor, *, index: Tensor | None = None) -> None:  # noqa: ARG002
        """Add one layer's token states ``(B, T, D)`` of a batch, after those of the previous layer."""
        check_tokens(states, mask)
        row = self._position(layer)
        previous = self._previous
        self._previous = (row, states.detach()) if row + 1 < len(self.layers) else None
        if row == 0:
            return
        if previous is None or previous[0] != row - 1 or previous[1].shape != states.shape:
            self._previous = None
            raise OptionError(
                f"`layer` {layer} must follow layer {self.layers[row - 1]} of the same batch: "
                f"update the layers in the order {list(self.layers)}, batch by batch."
            )
        for (before, real), (after, _) in zip(chunks(previous[1], mask), chunks(states, mask), strict=True):
            total, count = _rotations(single_or_better(before), single_or_better(after), real)
            self._add(row, total / count, count > 0)

    def reset(self) -> None:
        """Remove all texts and the current batch."""
        super().reset()
        self._previous = None
