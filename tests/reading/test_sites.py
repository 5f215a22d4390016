"""Outputs of attention and MLP inside the blocks: available in every tool that reads layers, and labeled as sites."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders.errors import OptionError
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.capture import capture
from tests.families import FAMILIES, inputs, tiny
from tests.others_warnings import MTEB

pytestmark = MTEB


QUICK = ("Llama", "GPT2", "OPT", "Mamba", "BERT", "ALBERT", "ViT", "WavLM")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_gives_one_state_per_token_and_block(family: str) -> None:
    model = tiny(family).eval()
    anatomy = find_anatomy(model)
    layers = range(1, anatomy.num_layers + 1)
    for site in ("attention", "mlp") if "Mamba" not in family else ("attention",):
        recorded: list[tuple[int, tuple[int, ...]]] = []

        def receive(layer: int, _: str, states: Tensor, recorded: Any = recorded) -> None:
            recorded.append((layer, tuple(states.shape)))

        stream: list[tuple[int, ...]] = []
        with torch.no_grad():
            capture(model, inputs(family), receive, anatomy=anatomy, layers=layers, sites=(site,))
            capture(model, inputs(family), lambda _, __, s, to=stream: to.append(tuple(s.shape)), anatomy=anatomy, layers=layers)  # type: ignore[misc]  # fmt: skip
        assert recorded == list(zip(layers, stream, strict=True))


class Block(nn.Module):
    """A block whose MLP flattens texts and tokens, like mixtures of experts, or splits the tokens."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.fc, self.halves = nn.Linear(4, 4), halves

    def forward(self, x: Tensor) -> Tensor:
        parts = x.reshape(2 * len(x), -1, 4) if self.halves else x.reshape(-1, 4)
        return x + self.fc(parts).reshape(x.shape)


@pytest.mark.parametrize("halves", [False, True])
def test_flattened_tokens_are_restored_and_others_are_refused(halves: bool) -> None:
    model = nn.Sequential(nn.Sequential(Block(halves), Block(halves)))
    anatomy = find_anatomy(model, blocks="0", final=())
    x, result = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0)), []
    loaded = lambda: capture(  # noqa: E731
        model, {"input": x}, lambda _, __, states: result.append(states), anatomy=anatomy, layers=[1, 2], sites=("mlp",)
    )
    if halves:
        with pytest.raises(OptionError, match=r"`site` 'mlp' cannot be read .* \(6, 3, 4\).* 3 inputs of 6 tokens"):
            loaded()
    else:
        loaded()
        torch.testing.assert_close(x + result[0] + result[1], model(x))
