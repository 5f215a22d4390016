import random
from typing import Any

import pytest
import torch
from torch import Tensor

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import NORMS, Norm
from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.extras.joint.reader import blocks_returning
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.reading.reader import LayerReader
from tests.models.test_cut import expected_states
from tests.support.families import DEPTH, FAMILIES, inputs, tiny
from tests.support.tiny_folders import TEXTS, Folder


def hooks_on(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_of_every_family_comes_from_one_pass(name: str, norm: Norm) -> None:
    model, actual = tiny(name), []
    before = hooks_on(model)
    with torch.no_grad():
        capture(
            model, inputs(name), lambda layer, states: actual.append((layer, states.reshape(2, -1, states.shape[-1]))),
            anatomy=find_anatomy(model), layers=range(DEPTH + 1), norm=norm,
        )  # fmt: skip
    assert [layer for layer, _ in actual] == list(range(DEPTH + 1))
    for (layer, states), expected in zip(actual, expected_states(name, norm), strict=True):
        torch.testing.assert_close(states, expected, msg=lambda text: f"layer {layer}: {text}")
    assert hooks_on(model) == before


@pytest.mark.parametrize("name", ["Llama", "BERT", "ALBERT", "Mamba"])
def test_blocks_after_the_last_requested_layer_do_not_run(name: str) -> None:
    model = tiny(name)
    anatomy = find_anatomy(model)
    ran: list[int] = []
    anatomy.block(model, DEPTH).register_forward_hook(lambda *_: ran.append(1))
    with torch.no_grad():
        capture(model, inputs(name), lambda *_: None, anatomy=anatomy, layers=[0, 2])
    assert len(ran) == (2 if name == "ALBERT" else 0)
    with torch.no_grad():
        model(**inputs(name))
    assert len(ran) == (6 if name == "ALBERT" else 1)


def test_replaced_forward_of_a_block_is_restored() -> None:
    model = tiny("Llama")
    block = find_anatomy(model).block(model, 1)
    states, saved = torch.zeros(1, 2, 4), block.forward
    block.forward = own = lambda states: states  # as accelerate does
    with blocks_returning(model, find_anatomy(model), (torch.ones(1, 2, 4),), states):
        assert block.forward(torch.ones(1, 2, 4))[0] is states
    assert block.forward is own
    del block.forward
    with blocks_returning(model, find_anatomy(model), states, states):
        assert block.forward(torch.ones(1, 2, 4)) is states
    assert block.forward == saved


def test_hooks_are_removed_when_a_batch_raises() -> None:
    model = tiny("Llama")

    def fail(*_: object) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        capture(model, inputs("Llama"), fail, anatomy=find_anatomy(model), layers=[1])
    assert hooks_on(model) == 0


def test_invalid_layers_are_refused() -> None:
    model = tiny("Llama")
    anatomy = find_anatomy(model)
    with pytest.raises(OptionError, match=r"within \[0, 4\]"):
        capture(model, inputs("Llama"), lambda *_: None, anatomy=anatomy, layers=[5])


# --- batches -------------------------------------------------------------------------------------------------------


def test_batches_hold_every_text_once_within_the_budget() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(0, 60) for _ in range(300)] + [500]
    batches = plan_batches(lengths, token_budget=256, max_texts=16)
    assert sorted(position for batch in batches for position in batch) == list(range(301))
    for batch in batches:
        assert len(batch) <= 16
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 256
    assert plan_batches(lengths, token_budget=256, max_texts=16) == batches
    assert plan_batches([]) == []
    with pytest.raises(OptionError, match="`token_budget` must be a whole number, 1 or more"):
        plan_batches([1], token_budget=0)


# --- vectors -------------------------------------------------------------------------------------------------------


def reader(encoder: LayerEncoder, **options: Any) -> LayerReader:
    model = encoder[0].model
    return LayerReader(model, encoder.preprocess, find_anatomy(model), list(range(DEPTH + 1)), **options)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["Llama", "BERT", "Mamba", "GPT2", "ALBERT"])
def test_one_pass_matches_an_encoder_cut_at_each_layer(name: str, norm: Norm, tiny_folder: Folder) -> None:
    full_encoder = LayerEncoder(tiny_folder(name), -1, device="cpu")
    vectors = torch.zeros(DEPTH + 1, len(TEXTS), 32)
    for positions, result in reader(full_encoder, norm=norm).embed(
        TEXTS, plan_batches([len(t) for t in TEXTS], max_texts=4)
    ):
        vectors[:, positions] = result
    for layer in range(DEPTH + 1):
        cut = LayerEncoder(tiny_folder(name), layer, norm=norm, device="cpu")
        torch.testing.assert_close(vectors[layer], torch.from_numpy(cut.encode(TEXTS)), rtol=1e-4, atol=2e-5)


def test_out_of_memory_halves_the_batch(tiny_folder: Folder) -> None:
    full_encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")

    def scarce(texts: list[str]) -> dict[str, Tensor]:
        if len(texts) > 2:
            raise torch.OutOfMemoryError
        return full_encoder.preprocess(texts)

    plain = reader(full_encoder)
    short = LayerReader(plain.model, scarce, plain.anatomy, plain.layers)
    batches = plan_batches([len(text) for text in TEXTS])
    actual = {i: result[:, n] for positions, result in short.embed(TEXTS, batches) for n, i in enumerate(positions)}
    for positions, result in plain.embed(TEXTS, batches):
        for n, i in enumerate(positions):
            torch.testing.assert_close(actual[i], result[:, n], rtol=1e-5, atol=1e-5)
    with pytest.raises(torch.OutOfMemoryError):
        list(LayerReader(plain.model, lambda _: scarce(["x"] * 9), plain.anatomy, [1]).embed(TEXTS, batches))


def test_nan_error_names_layer_and_text(tiny_folder: Folder) -> None:
    full_encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with torch.no_grad():
        full_encoder[0].model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match="Layer 2 gives NaN or infinity for 'the cat"):
        list(reader(full_encoder).embed(TEXTS, [[0, 1]]))
    with pytest.raises(NotFiniteError, match="Layer 4 gives NaN"):
        full_encoder.encode_layers(TEXTS, [1, 4])
