"""Which tokens are pooled, compared with a loop over the tokens of each text."""

import itertools

import pytest
import torch

from midlayer_encoders.token_selector import TokenLayout, TokenSelector


def read_aloud(length: int, counting: TokenSelector) -> list[int]:
    """Return the positions that count among the real tokens of a text."""
    placed = counting.placed
    places = list(range(length))
    if not counting.template_tokens:
        own_values = max((length - placed.added) // placed.copies, 0)
        places = places[: length - placed.back][-own_values:] if own_values else []
        return [place for place in places if place >= counting.skip_first]
    return [place for place in places if place >= counting.skip_first] or places[-1:]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("placed", [TokenLayout(), TokenLayout(1, 0, 2), TokenLayout(2, 3, 1, 2)])
def test_token_selection_matches_a_loop(placed: TokenLayout, side: str) -> None:
    for skip, template_tokens in itertools.product((0, 1, 3), (True, False)):
        counting = TokenSelector(placed, skip, template_tokens)
        lengths = [placed.added + placed.copies * own_values for own_values in (0, 1, 4)] + (
            [0] if template_tokens else []
        )
        mask = torch.zeros(len(lengths), 16, dtype=torch.bool)
        expected = torch.zeros_like(mask)
        for row, length in enumerate(lengths):
            start = 16 - length if side == "left" else 0
            mask[row, start : start + length] = True
            expected[row, [start + place for place in read_aloud(length, counting)]] = True
        assert torch.equal(counting(mask), expected), counting
