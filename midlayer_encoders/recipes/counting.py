"""Which tokens of a text become its vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from midlayer_encoders.recipes.template import Placed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Counting"]


@dataclass(frozen=True)
class Counting:
    """Leaves tokens out of the pooling: the first ones, or those of the template.

    Attributes:
        placed: where a text's own tokens are.
        skip_first: real tokens at the beginning that do not count, unless there are no others.
        template_tokens: whether those of the template and special ones count. Without them the last copy of the text
            counts, and a text without tokens of its own has none.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()
        >>> Counting(skip_first=1)(mask).int().tolist()
        [[0, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
        >>> Counting(Placed(front=1, back=1), template_tokens=False)(mask).int().tolist()
        [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    """

    placed: Placed = Placed()
    skip_first: int = 0
    template_tokens: bool = True

    @property
    def all(self) -> bool:
        """Whether every real token counts."""
        return not self.skip_first and (self.template_tokens or not self.placed.added)

    def __call__(self, mask: Tensor) -> Tensor:
        """Return which tokens count, of those that are real, bool, shape ``(B, T)``; whichever side is padded."""
        mask = mask.bool()
        if self.all:
            return mask
        length = mask.sum(dim=1, keepdim=True)
        place = mask.cumsum(dim=1) - 1  # among the real tokens
        counted = mask & (place >= self.skip_first)
        if self.template_tokens:
            return counted | (mask & (place == length - 1))
        placed = self.placed
        own = ((length - placed.added) // placed.copies).clamp(min=0)
        end = length - placed.back
        return counted & (place >= end - own) & (place < end)
