"""Some of the census (``benchmarks/census.py``): a few model types for each class of error that a cut can make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import census
from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import Norm
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.models import anatomy
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from tests.uncut import find_stack

EXACT: list[tuple[str, int, Norm]] = [
    # What follows the last block is found by what it does.
    ("nemotron", 0, "none"), ("bloom", 2, "final"), ("mlcd_vision_model", 2, "final"), ("unispeech", 2, "final"),
    # Families that cannot be made, or run, without a block.
    ("modernbert-decoder", 0, "final"), ("xmod", 0, "final"), ("led", 0, "final"),
    # Blocks of several kinds in one list; the block after the last one is of another kind.
    ("jamba", 4, "none"), ("zamba2", 2, "final"), ("nemotron_h", 2, "none"),
    # Cut before the first block of attention, whose cache would say how long the text is.
    ("qwen3_next", 1, "final"),
    # Lists of one thing for each block under unusual names; weights that come and go with the depth and make no state.
    ("molmo2_text", 4, "none"), ("xlstm", 2, "final"), ("zamba", 2, "final"), ("longformer", 2, "none"), ("gpt_neo", 3, "final"), ("esm", 2, "final"),
    # An input alone has other states than in a padded batch.
    ("convbert", 1, "final"), ("deepseek_v32", 4, "final"), ("fnet", 2, "final"), ("nystromformer", 2, "none"), ("data2vec-audio", 2, "final"),
    # Blocks that return lists; that are called past hooks; whose states have their axes in another order.
    ("openai-gpt", 2, "none"), ("squeezebert", 2, "none"), ("xlnet", 4, "final"),
    # The encoder of a model that has a decoder too, whose weights have the same names; embeddings that both share.
    ("bart", 2, "none"), ("marian", 4, "final"), ("t5gemma", 2, "final"),
    # The language model of one that also reads images.
    ("llava", 2, "final"), ("gemma3", 3, "none"), ("qwen3_vl_moe", 2, "final"),
]  # fmt: skip
ONE_MORE = {
    "bloom", "mlcd_vision_model", "xmod", "led", "jamba", "xlstm", "zamba", "longformer", "deepseek_v32",
    "nystromformer", "data2vec-audio", "marian", "llava", "qwen3_vl_moe",
}  # fmt: skip
"""Model types of a class of which a quicker one is there too."""


def worst(encoder: LayerEncoder, model: Any, medium: str, processor: Any, layer: int, norm: str) -> float:
    """Return the largest difference from the uncut model, over an input alone and a padded batch."""
    items = census.INPUTS[medium]()
    given = [census.prepared(processor, medium, item) for item in items]
    uncut = find_stack(census.uncut_of(model, None), given[0])
    expected = torch.stack([uncut.layers(one)[norm][layer][0].mean(dim=0) for one in given])
    alone = census.error(encoder.encode(items[2], show_progress_bar=False), expected[2])
    return max(alone, census.error(encoder.encode(items, show_progress_bar=False), expected))


@pytest.mark.parametrize("tower", ["text", "image"])
def test_a_tower_whose_weights_have_other_names_by_themselves(tower: str, tmp_path: Path) -> None:
    model, _, processor = census.build("altclip", tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, tower=tower, device="cpu")
    part, items = census.uncut_of(model, tower), census.INPUTS[tower]()
    if tower == "image":
        processor = census.processor_of("altclip", tower, "", model.config.vision_config)
    given = [census.prepared(processor, tower, item) for item in items]
    uncut = find_stack(part, given[0])
    expected = torch.stack([uncut.layers(one)["final"][2][0].mean(dim=0) for one in given])
    assert census.error(encoder.encode(items), expected) < census.TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "layer", "norm"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[0] in ONE_MORE else []) for case in EXACT],
)
def test_a_layer_is_that_of_the_uncut_model(model_type: str, layer: int, norm: Norm, tmp_path: Path) -> None:
    if model_type not in census.registered():
        pytest.skip(f"this transformers has no {model_type}")
    model, medium, processor = census.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), layer, norm=norm, device="cpu")
    assert worst(encoder, model, medium, processor, layer, norm) < census.TOLERANCE


REFUSED = [
    ("big_bird", -1, {}, "A forward pass changes BigBirdModel itself .*original_full"),
    ("rwkv", -1, {}, "A forward pass changes RwkvModel itself .*rescale_every"),
    ("bamba", -1, {"bidirectional": True}, "those of blocks 1, 3 see only those before them"),
    ("swin", -1, {}, "a model of several stages"),
    ("canine", -1, {}, "an unknown module changes them"),
]


@pytest.mark.parametrize(("model_type", "layer", "options", "text"), REFUSED)
def test_what_cannot_be_exact_is_refused(
    model_type: str, layer: int, options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    census.build(model_type, tmp_path)
    with pytest.raises(MidlayerError, match=text):
        LayerEncoder(str(tmp_path), layer, device="cpu", **options)


@pytest.mark.parametrize(
    ("table", "model_type", "text"),
    [
        ("_PAST_HOOKS", "squeezebert", "bypasses their hooks"),
        ("_AXES", "xlnet", "gives other states for layer 4"),
    ],
)
def test_families_that_break_a_rule_and_stand_in_no_table_are_refused(
    table: str, model_type: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    census.build(model_type, tmp_path)
    monkeypatch.setattr(anatomy, table, {})
    with pytest.raises(MidlayerError, match=text):
        LayerEncoder(str(tmp_path), -1, device="cpu")


@pytest.mark.parametrize("model_type", ["openai-gpt", "squeezebert", "xlnet"])
def test_all_layers_come_from_one_pass(model_type: str, tmp_path: Path) -> None:
    model, medium, processor = census.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), -1, device="cpu")
    given = [census.prepared(processor, medium, item) for item in census.TEXTS]
    uncut = find_stack(model, given[0])
    expected = [torch.stack([states[0].mean(dim=0) for states in uncut.layers(one)["final"]]) for one in given]
    made = layer_reader(encoder).vectors(census.TEXTS, batches_of(encoder, census.TEXTS))
    assert census.error(made, torch.stack(expected, dim=1)) < census.TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("big_bird", {"attention_type": "original_full"}),
        pytest.param("rwkv", {"rescale_every": 0}, marks=pytest.mark.slow),
    ],
)
def test_the_advice_of_a_refusal_works(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    import transformers as tf

    model, medium, processor = census.build(model_type, tmp_path)
    config = tf.AutoConfig.from_pretrained(tmp_path)
    for name, value in settings.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    model = tf.AutoModel.from_pretrained(tmp_path)
    encoder = LayerEncoder(str(tmp_path), 3, device="cpu")
    assert worst(encoder, model, medium, processor, 3, "final") < census.TOLERANCE


def test_a_model_that_asks_for_padding_once_its_mask_is_off_gets_it(tmp_path: Path) -> None:
    census.build("mpt", tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, bidirectional=True, device="cpu")
    together = torch.as_tensor(encoder.encode(census.TEXTS))
    alone = torch.stack([torch.as_tensor(encoder.encode(text)) for text in census.TEXTS])
    torch.testing.assert_close(together, alone)
    assert not torch.allclose(
        alone[0], torch.as_tensor(LayerEncoder(str(tmp_path), 2, device="cpu").encode(census.TEXTS[0]))
    )
    with pytest.raises(MidlayerError, match="only where a batch is padded"):
        encoder.save_pretrained(str(tmp_path / "plain"))


def test_a_model_without_a_mask_to_turn_off_is_refused(tmp_path: Path) -> None:
    census.build("bert", tmp_path)
    with pytest.raises(OptionError, match="no causal mask to turn off"):
        LayerEncoder(str(tmp_path), 2, bidirectional=True, device="cpu")


def test_a_padded_folder_that_would_depend_on_the_batch_is_not_written(tmp_path: Path) -> None:
    census.build("fnet", tmp_path / "whole")
    encoder = LayerEncoder(str(tmp_path / "whole"), 2, device="cpu")
    with pytest.raises(MidlayerError, match="Padding changes the states of a text"):
        encoder.save_pretrained(str(tmp_path / "plain"))


@pytest.mark.slow
def test_every_model_type_is_exact_or_refused() -> None:
    found = list(census.census(census.registered(), workers=2, seconds=1e9))
    bad = {one["type"]: one["why"] for one in found if one["verdict"] in ("wrong", "raised")}
    assert not bad
    assert sum(one["verdict"] == "exact" for one in found) >= 220
