"""``LayerEncoder.from_module``: modules whose layers depend on the number of their blocks, and padded batches."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import AnatomyError, CutError, OptionError
from tests.support.families import tiny
from tests.support.tiny_folders import TEXTS, tokenizer

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


class SharedBlock(Model):
    """One block in every place of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * DEPTH)


class InPlaceBlocks(Model):
    """Every block changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ELU(inplace=True) for _ in range(DEPTH))


class ScaledInPlace(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids)
        for block in self.blocks:
            states = block(states).mul_(2)
        return states


class Normed(Model):
    """Norms before and after the blocks, in the order in which the rules on names choose the wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            nn.init.normal_(self.norm.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.norm(self.table(input_ids))
        for block in self.blocks:
            states = block(states)
        return self.end(states)  # type: ignore[no-any-return]


class NormedEmbeddings(Normed):
    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.norm(self.table(input_ids))
        for block in self.blocks:
            states = block(states)
        return states


class Unnormed(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        return nn.functional.normalize(super().forward(input_ids), dim=-1)


class RemembersBatch(Model):
    """Adds the mean of the previous batch, which is the same in every pass but the first if a batch is repeated."""

    previous: Tensor | float = 0.0

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids) + self.previous
        self.previous = self.table(input_ids).mean()
        for block in self.blocks:
            states = block(states)
        return states


class PositionsFirst(Model):
    """Blocks receive positions before their states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids)
        positions = torch.ones_like(states).cumsum(dim=1)
        for block in self.blocks:
            states = block(positions, states)
        return states


class ChannelsFirst(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(DEPTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids).transpose(1, 2)
        for block in self.blocks:
            states = block(states)
        return states


class OtherArgument(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class FirstToken(Model):
    """A token of the module's own before those of the text, so the mask of the inputs does not fit."""

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids)
        states = torch.cat([torch.ones_like(states[:, :1]), states], dim=1)
        for block in self.blocks:
            states = block(states)
        return states


class RequiredMask(Model):
    """Requires a mask that it ignores, so padding changes its states."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert attention_mask.shape == input_ids.shape
        states = self.table(input_ids)
        states = states - states.mean(dim=1, keepdim=True)
        for block in self.blocks:
            states = block(states)
        return states


class ShortTextsOnly(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.table(input_ids)
        for block in list(self.blocks)[: DEPTH if input_ids.shape[1] < 20 else 1]:
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

    handles = [block.register_forward_hook(record, with_kwargs=True) for block in dict.fromkeys(model.blocks)]
    model(torch.tensor(ids_of([text])))
    for handle in handles:
        handle.remove()
    return inputs, outputs


def expected_vector(model: Model, text: str, layer: int) -> np.ndarray:
    inputs, outputs = uncut_states(model, text)
    states = outputs[layer - 1] if layer else inputs[0]
    return states[0].mean(dim=0).numpy()


@pytest.mark.parametrize("make", [Model, ScaledEmbeddings, Reversed, SharedBlock, NormedEmbeddings])
def test_every_layer_is_that_of_the_uncut_module(make: type[Model], tmp_path: Path) -> None:
    model = make()
    for layer in range(DEPTH + 1):
        encoder = encoder_of(model, layer)
        expected = np.stack([expected_vector(model, text, layer) for text in TEXTS])
        np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-6)
        np.testing.assert_allclose(encoder.encode_layers(TEXTS)[layer], expected, atol=1e-6)
    assert len(model.blocks) == DEPTH
    with pytest.raises(CutError, match="is a module in memory"):
        encoder.save_pretrained(str(tmp_path))


def test_layers_of_blocks_that_change_their_input_in_place() -> None:
    model = InPlaceBlocks()
    expected = [encoder_of(model, layer).encode(TEXTS) for layer in (0, 2)]
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    np.testing.assert_allclose(encoder_of(model, 2).encode_layers(TEXTS)[[0, 2]], np.stack(expected), atol=1e-6)


@pytest.mark.long
def test_final_modules_are_those_that_the_states_pass_through() -> None:
    model = Normed().eval()
    with torch.no_grad():
        last = np.stack([model(torch.tensor(ids_of([text])))[0].mean(dim=0).numpy() for text in TEXTS])
    np.testing.assert_allclose(encoder_of(model, -1).encode(TEXTS), last, atol=1e-6)
    for layer in range(DEPTH + 1):
        inputs, outputs = uncut_states(model, TEXTS[0])
        states = outputs[layer - 1] if layer else inputs[0]
        expected = model.end(states)[0].mean(dim=0).detach().numpy()
        np.testing.assert_allclose(encoder_of(model, layer).encode(TEXTS[0]), expected, atol=1e-6)


@pytest.mark.parametrize("make", [FirstToken, RequiredMask])
def test_texts_in_a_padded_batch_have_the_vectors_that_they_have_alone(make: type[Model]) -> None:
    model = make()
    encoder = encoder_of(model, 2)
    alone = np.stack([encoder.encode(text) for text in TEXTS])
    if make is FirstToken:
        expected = np.stack([expected_vector(model, text, 2) for text in TEXTS])
        np.testing.assert_allclose(alone, expected, atol=1e-6)
    np.testing.assert_allclose(encoder.encode(TEXTS), alone, atol=1e-6)
    np.testing.assert_allclose(encoder.encode_layers(TEXTS)[2], alone, atol=1e-6)


def test_text_on_which_fewer_blocks_run_is_refused() -> None:
    encoder = encoder_of(ShortTextsOnly(), 2)
    assert encoder.encode("short").shape == (WIDTH,)
    with pytest.raises(CutError, match="runs fewer than 2 of its blocks"):
        encoder.encode("a text of more than twenty letters")


def test_final_module_must_exist() -> None:
    with pytest.raises(AnatomyError, match="`final` must name modules in Model, but it has no 'norm'"):
        LayerEncoder.from_module(Model(), 2, processor=tokenizer(), medium="text", blocks="blocks", final=["norm"])


def test_module_that_cannot_be_copied_is_refused() -> None:
    model = Model()
    model.cached = model.table.weight * 2  # type: ignore[assignment]
    with pytest.raises(OptionError, match="`module` must be copyable"):
        encoder_of(model, 2)


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
        (ChannelsFirst, r"states of shape \(1, 16, 5\) for one input"),
        (ScaledInPlace, "changes its states between blocks 1 and 2"),
        (RemembersBatch, "gives other states for the same input in a second pass"),
        (Unnormed, "changes its states after its last block in an unknown way. Pass norm='none'"),
        (PositionsFirst, r"all receive the same first tensor, which is not their states"),
        (OtherArgument, r"does not run on no argument.*missing 1 required.*by name, or one tensor"),
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


class MeanBlock(nn.Module):
    """A residual block that sees all tokens, padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.linear(states.mean(dim=1, keepdim=True)).tanh()


class ScaledAndUnmasked(ScaledEmbeddings):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MeanBlock() for _ in range(DEPTH))


def test_uncut_module_is_not_padded_if_padding_changes_its_states() -> None:
    encoder = encoder_of(ScaledAndUnmasked(), 2)
    texts = ["a", "a longer text"]
    alone = np.stack([encoder.encode(text) for text in texts])
    np.testing.assert_allclose(encoder.encode(texts), alone, atol=1e-6)


def test_a_tokenizer_is_for_texts() -> None:
    with pytest.raises(OptionError, match="`medium` must be one of 'text', but got 'image'"):
        LayerEncoder.from_module(tiny("Llama"), 2, processor=tokenizer())
