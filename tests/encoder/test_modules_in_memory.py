"""``LayerEncoder.from_module``: modules whose layers depend on the number of their blocks, and padded batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, OptionError
from tests.families import tiny
from tests.tiny_folders import TEXTS, tokenizer

DEPTH = 5
WIDTH = 16


class Block(nn.Module):
    """A residual block that sees only earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        before = states.cumsum(dim=1) / torch.arange(1, states.shape[1] + 1)[:, None]
        return states + self.linear(before).tanh()


class Model(nn.Module):
    """A causal stack; subclasses change how its blocks are called."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.table = nn.Embedding(len(tokenizer()), WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids)
        for block in self.blocks:
            states = block(states)
        return states


class ScaledEmbeddings(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids) * len(self.blocks)
        for block in self.blocks:
            states = block(states)
        return states


class Reversed(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids)
        for block in reversed(self.blocks):
            states = block(states)
        return states


class Skips(Model):
    """The inputs of the first two blocks are added before the last two."""

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids)
        inputs: list[Tensor] = []
        for position, block in enumerate(self.blocks):
            if position < len(self.blocks) // 2:
                inputs.append(states)
            elif position > len(self.blocks) // 2:
                states = states + inputs.pop()
            states = block(states=states)
        return states


class ResidualOutside(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids)
        for block in self.blocks:
            states = states + block(states) / len(self.blocks) ** 0.5
        return states


class LastBlockUnused(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids)
        for block in list(self.blocks)[: DEPTH - 1]:
            states = block(states)
        return states


class CalledTwice(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.repeat(self.repeat(self.table(input_ids)))

    def repeat(self, states: Tensor) -> Tensor:
        for block in self.blocks:
            states = block(states)
        return states


class RandomStates(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids) + torch.rand(1)
        for block in self.blocks:
            states = block(states)
        return states


class TokensFirst(Model):
    """The first axis of the states counts tokens, which is the default of `nn.TransformerEncoderLayer`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32) for _ in range(DEPTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids).transpose(0, 1)
        for block in self.blocks:
            states = block(states)
        return states


class Wrapper(nn.Module):
    """A module that passes its arguments on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs: Any) -> Any:
        return self.inner(**kwargs)


def ids_of(texts: list[str]) -> list[list[int]]:
    return [tokenizer()(text)["input_ids"] for text in texts]


def padded_to(length: int, side: str = "right", mask: bool = False) -> Callable[[list[str]], Any]:
    """Return a processor that pads with zeros to a length, or to the longest text."""

    def prepare(texts: list[str]) -> Any:
        rows = ids_of(texts)
        longest = max(length, *map(len, rows))

        def pad(row: list[int], value: list[int]) -> list[int]:
            padding = [0] * (longest - len(row))
            return value + padding if side == "right" else padding + value

        ids = torch.tensor([pad(row, row) for row in rows])
        ones = torch.tensor([pad(row, [1] * len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": ones} if mask else ids

    return prepare


def encoder_of(model: nn.Module, layer: Any, processor: Any = None) -> LayerEncoder:
    processor = tokenizer() if processor is None else processor
    return LayerEncoder.from_module(model, layer, processor=processor, medium="text", blocks="blocks", device="cpu")


@torch.no_grad()
def uncut_states(model: Model, text: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return the input and the output of every call of a block of the uncut module, from hooks."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        inputs.append((*args, *kwargs.values())[0])
        outputs.append(output)

    handles = [block.register_forward_hook(record, with_kwargs=True) for block in model.blocks]
    model(torch.tensor(ids_of([text])))
    for handle in handles:
        handle.remove()
    return inputs, outputs


def expected_vector(model: Model, text: str, layer: int) -> np.ndarray:
    inputs, outputs = uncut_states(model, text)
    states = outputs[layer - 1] if layer else inputs[0]
    return states[0].mean(dim=0).numpy()


@pytest.mark.parametrize("make", [Model, ScaledEmbeddings, Reversed])
def test_every_layer_is_that_of_the_uncut_module(make: type[Model], tmp_path: Path) -> None:
    model = make()
    for layer in range(DEPTH + 1):
        encoder = encoder_of(model, layer)
        expected = np.stack([expected_vector(model, text, layer) for text in TEXTS])
        np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-6)
        np.testing.assert_allclose(encoder.encode_layers(TEXTS)[layer], expected, atol=1e-6)
        size = len(encoder.transformer.blocks)  # type: ignore[arg-type]
        assert size == (max(layer, 1) if make is Model or (make is Reversed and layer == 0) else DEPTH)
    assert len(model.blocks) == DEPTH
    with pytest.raises(CutError, match="is a module in memory"):
        encoder.save_pretrained(str(tmp_path))


def test_several_layers_of_a_module_that_cannot_be_cut() -> None:
    model = ScaledEmbeddings()
    vectors = encoder_of(model, [1, 3]).encode(TEXTS)
    expected = [(expected_vector(model, text, 1) + expected_vector(model, text, 3)) / 2 for text in TEXTS]
    np.testing.assert_allclose(vectors, np.stack(expected), atol=1e-6)


def test_layers_before_the_first_skip_connection_are_exact_and_later_ones_refused() -> None:
    model = Skips()
    for layer in range(3):
        expected = np.stack([expected_vector(model, text, layer) for text in TEXTS])
        np.testing.assert_allclose(encoder_of(model, layer).encode(TEXTS), expected, atol=1e-6)
    for layer in range(3, DEPTH + 1):
        with pytest.raises(CutError, match=r"changes its states between blocks 3 and 4.*inside a block"):
            encoder_of(model, layer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ResidualOutside, "changes its states between blocks 1 and 2"),
        (LastBlockUnused, r"must call each of its 5 blocks \('blocks'\) once, but made 4 calls"),
        (CalledTwice, r"must call each of its 5 blocks \('blocks'\) once, but made 10 calls"),
        (RandomStates, "gives other states for the same input in a second pass"),
        (TokensFirst, r"states of shape \(5, 1, 16\) for one input"),
    ],
)
@pytest.mark.parametrize("layer", [2, DEPTH])
def test_modules_without_well_defined_layers_are_refused(make: type[Model], message: str, layer: int) -> None:
    with pytest.raises(CutError, match=message):
        encoder_of(make(), layer)


@pytest.mark.parametrize("length", [0, 40])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_without_a_mask_is_refused(length: int, side: str) -> None:
    """Padding does not change the states of a causal module, only their mean."""
    with pytest.raises(OptionError, match="`processor` must return an `attention_mask`"):
        encoder_of(Model(), 2, padded_to(length, side))


def test_padding_on_the_left_is_refused() -> None:
    with pytest.raises(OptionError, match="`processor` must pad on the right"):
        encoder_of(Model(), 2, padded_to(0, "left", mask=True))


def test_tokenizer_that_pads_on_the_left_pads_on_the_right_in_every_batch() -> None:
    """The first batch has texts of equal length."""
    model, left = Model(), tokenizer()
    left.padding_side = "left"
    texts = ["the longest text", "a text as long 2", "shorter", "of all"]
    expected = np.stack([expected_vector(model, text, 2) for text in texts])
    np.testing.assert_allclose(encoder_of(model, 2, left).encode(texts, batch_size=2), expected, atol=1e-6)
    assert left.padding_side == "left"


def test_module_may_have_a_config_of_any_type() -> None:
    model = Model()
    model.config = SimpleNamespace(num_hidden_layers=DEPTH)
    encoder = encoder_of(model, 2)
    expected = np.stack([expected_vector(model, text, 2) for text in TEXTS])
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-6)
    assert encoder.transformer.config.num_hidden_layers == DEPTH  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [0, 40])
def test_masked_padding_is_not_pooled(length: int) -> None:
    model = Model()
    expected = np.stack([expected_vector(model, text, 2) for text in TEXTS])
    np.testing.assert_allclose(encoder_of(model, 2, padded_to(length, mask=True)).encode(TEXTS), expected, atol=1e-6)


def test_tokenizer_that_returns_no_mask_by_default_is_asked_for_one() -> None:
    without_mask = tokenizer()
    without_mask.model_input_names = ["input_ids"]
    model = Model()
    expected = np.stack([expected_vector(model, text, 2) for text in TEXTS])
    np.testing.assert_allclose(encoder_of(model, 2, without_mask).encode(TEXTS), expected, atol=1e-6)


def test_unpadded_batches_need_no_mask() -> None:
    def first_letters(texts: list[str]) -> Tensor:
        return torch.tensor([row[:4] for row in ids_of(texts)])

    vectors = encoder_of(Model(), 2, first_letters).encode(TEXTS)
    assert vectors.shape == (len(TEXTS), WIDTH)


def test_wrapper_that_takes_any_argument_gets_the_features_of_the_processor() -> None:
    model = tiny("Llama")
    options: dict[str, Any] = {"processor": tokenizer(), "medium": "text", "device": "cpu"}
    expected = LayerEncoder.from_module(model, 2, **options).encode(TEXTS)
    wrapped = LayerEncoder.from_module(Wrapper(model), 2, blocks="inner.layers", final=["inner.norm"], **options)
    np.testing.assert_allclose(wrapped.encode(TEXTS), expected, atol=1e-6)
