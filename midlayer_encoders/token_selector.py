"""Which tokens of a sequence are pooled, and where a text's tokens are in a template; without an import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from midlayer_encoders.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    """Positions of a text's tokens in a template.

    Attributes:
        front: number of tokens before the first copy, including special tokens.
        between: number of tokens between two copies.
        back: number of tokens after the last copy, including special tokens.
        copies: number of copies of the text.
        question: number of tokens between the first copy and the mark; 0 without a mark.
    """

    front: int = 0
    between: int = 0
    back: int = 0
    copies: int = 1
    question: int = 0

    @property
    def added(self) -> int:
        """Number of tokens that do not belong to the text."""
        return self.front + self.question + self.between + self.back


@dataclass(frozen=True)
class TokenSelector:
    """Selects the tokens to pool: leaves out the first ones, the template's, or special ones.

    Attributes:
        placed: positions of the text's tokens.
        skip_first: number of real tokens at the start to leave out, unless there are no others.
        template_tokens: whether to pool template and special tokens. Without them the last copy of the text is pooled,
            and an empty text has no tokens.
        prompt_tokens: number of real tokens at the start that are never pooled: a prompt's.
        special_ids: ids of tokens that are never pooled, at any position; a text of only these has no tokens.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]).bool()
        >>> TokenSelector(skip_first=1)(mask).int().tolist()
        [[0, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
        >>> TokenSelector(TokenLayout(front=1, back=1), template_tokens=False)(mask).int().tolist()
        [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
        >>> ids = torch.tensor([[101, 7, 8, 102, 0], [101, 0, 0, 0, 0]])
        >>> TokenSelector(special_ids=(101, 102))(mask, ids).int().tolist()
        [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    """

    placed: TokenLayout = TokenLayout()
    skip_first: int = 0
    template_tokens: bool = True
    prompt_tokens: int = 0
    special_ids: tuple[int, ...] = ()

    @property
    def all(self) -> bool:
        """Whether every real token is pooled, or the pooling itself finds its spans."""
        if self.placed.question:
            return True
        leaves_out = self.skip_first or self.prompt_tokens or self.special_ids
        return not leaves_out and (self.template_tokens or not self.placed.added)

    def __call__(self, mask: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the mask of the pooled tokens, bool, shape ``(B, T)``; padding may be on either side.

        Args:
            mask: true at real tokens, shape ``(B, T)``.
            ids: the tokens, for ``special_ids``; fewer than in ``mask`` if the model pads to whole windows.
        """
        mask = mask.bool()
        if self.all:
            return mask
        pooled = self._by_position(mask)
        if not self.special_ids:
            return pooled
        if ids is None:
            raise OptionError("`skip_special` must be False for inputs without token ids, such as images.")
        from torch.nn.functional import pad

        special = (ids[..., None] == ids.new_tensor(self.special_ids)).any(dim=-1).to(mask.device)
        return pooled & ~pad(special, (0, mask.shape[1] - special.shape[1]))

    def _by_position(self, mask: Tensor) -> Tensor:
        length = mask.sum(dim=1, keepdim=True)
        position = mask.cumsum(dim=1) - 1  # among the real tokens
        mask = mask & (position >= self.prompt_tokens)
        pooled = mask & (position >= self.skip_first)
        if self.template_tokens:
            return pooled | (mask & (position == length - 1))
        text_length = ((length - self.placed.added) // self.placed.copies).clamp(min=0)
        end = length - self.placed.back
        return pooled & (position >= end - text_length) & (position < end)
