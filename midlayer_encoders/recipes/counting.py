"""The tokens of a text that are pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from midlayer_encoders.recipes.template import TokenLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Counting:
    """Selects the tokens to pool: leaves out the first ones, or those of the template.

    Attributes:
        placed: positions of the text's tokens.
        skip_first: number of real tokens at the start to leave out, unless there are no others.
        template_tokens: whether to pool template and special tokens. Without them the last copy of the text is pooled,
            and an empty text has no tokens.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()
        >>> Counting(skip_first=1)(mask).int().tolist()
        [[0, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
        >>> Counting(TokenLayout(front=1, back=1), template_tokens=False)(mask).int().tolist()
        [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    """

    placed: TokenLayout = TokenLayout()
    skip_first: int = 0
    template_tokens: bool = True

    @property
    def all(self) -> bool:
        """Whether every real token is pooled."""
        return not self.skip_first and (self.template_tokens or not self.placed.added)

    def __call__(self, mask: Tensor) -> Tensor:
        """Return the mask of the pooled tokens, bool, shape ``(B, T)``; padding may be on either side."""
        mask = mask.bool()
        if self.all:
            return mask
        length = mask.sum(dim=1, keepdim=True)
        position = mask.cumsum(dim=1) - 1  # among the real tokens
        pooled = mask & (position >= self.skip_first)
        if self.template_tokens:
            return pooled | (mask & (position == length - 1))
        text_length = ((length - self.placed.added) // self.placed.copies).clamp(min=0)
        end = length - self.placed.back
        return pooled & (position >= end - text_length) & (position < end)
