"""A sample of the census (``benchmarks/quality/census.py``): a few model types for each kind of error that a cut can make."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality import census
from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import Norm
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.models import anatomy
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from tests.support import tiny_types
from tests.support.uncut import find_stack

EXACT: list[tuple[str, int, Norm]] = [
    # Operations after the last block are recognized by their effect.
    ("nemotron", 0, "none"), ("bloom", 2, "final"), ("mlcd_vision_model", 2, "final"), ("unispeech", 2, "final"),
    # Families that cannot be created or run without a block.
    ("modernbert-decoder", 0, "final"), ("xmod", 0, "final"), ("led", 0, "final"),
    # Several kinds of blocks in one list; the block after the last one is of another kind.
    ("jamba", 4, "none"), ("zamba2", 2, "final"), ("nemotron_h", 2, "none"),
    # Cut before the first attention block, whose cache determines the length of the text.
    ("qwen3_next", 1, "final"),
    # Per-block lists under unusual names; weights that depend on the depth but do not affect the states.
    ("molmo2_text", 4, "none"), ("xlstm", 2, "final"), ("zamba", 2, "final"), ("longformer", 2, "none"), ("gpt_neo", 3, "final"), ("esm", 2, "final"),
    # A single input has other states than the same input in a padded batch.
    ("convbert", 1, "final"), ("deepseek_v32", 4, "final"), ("fnet", 2, "final"), ("nystromformer", 2, "none"), ("data2vec-audio", 2, "final"),
    # Blocks that return lists, or whose states have another axis order.
    ("openai-gpt", 2, "none"), ("xlnet", 4, "final"),
    # Encoders of encoder-decoder models: weights with the same names, shared embeddings.
    ("bart", 2, "none"), ("marian", 4, "final"), ("t5gemma", 2, "final"),
    # Language models of vision-language models.
    ("llava", 2, "final"), ("gemma3", 3, "none"), ("qwen3_vl_moe", 2, "final"),
]  # fmt: skip
SLOW = {
    "bloom", "mlcd_vision_model", "xmod", "led", "jamba", "xlstm", "zamba", "longformer", "deepseek_v32",
    "nystromformer", "data2vec-audio", "marian", "llava", "qwen3_vl_moe",
}  # fmt: skip
"""Model types for which a faster type of the same kind is also in the list."""


def largest_error(encoder: LayerEncoder, model: Any, medium: str, processor: Any, layer: int, norm: str) -> float:
    """Return the largest difference from the uncut model, over an input alone and a padded batch."""
    items = tiny_types.INPUTS[medium]()
    inputs = [tiny_types.prepared(processor, medium, item) for item in items]
    uncut = find_stack(tiny_types.uncut_of(model, None), inputs[0])
    expected = torch.stack([uncut.layers(item_inputs)[norm][layer][0].mean(dim=0) for item_inputs in inputs])
    single_error = tiny_types.error(encoder.encode(items[2], show_progress_bar=False), expected[2])
    return max(single_error, tiny_types.error(encoder.encode(items, show_progress_bar=False), expected))


@pytest.mark.long
@pytest.mark.parametrize("tower", ["text", "image"])
def test_tower_whose_weights_have_other_names_in_a_standalone_model(tower: str, tmp_path: Path) -> None:
    model, _, processor = tiny_types.build("altclip", tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, tower=tower, device="cpu")
    part, items = tiny_types.uncut_of(model, tower), tiny_types.INPUTS[tower]()
    if tower == "image":
        processor = tiny_types.processor_of("altclip", tower, "", model.config.vision_config)
    inputs = [tiny_types.prepared(processor, tower, item) for item in items]
    uncut = find_stack(part, inputs[0])
    expected = torch.stack([uncut.layers(item_inputs)["final"][2][0].mean(dim=0) for item_inputs in inputs])
    assert tiny_types.error(encoder.encode(items), expected) < tiny_types.TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "layer", "norm"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case[0] in SLOW else []) for case in EXACT],
)
def test_layer_matches_the_uncut_model(model_type: str, layer: int, norm: Norm, tmp_path: Path) -> None:
    if model_type not in tiny_types.registered():
        pytest.skip(f"this transformers has no {model_type}")
    model, medium, processor = tiny_types.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), layer, norm=norm, device="cpu")
    assert largest_error(encoder, model, medium, processor, layer, norm) < tiny_types.TOLERANCE


UNCUT: list[tuple[str, int, Norm]] = [
    # A scale by depth inside the blocks; blocks that share keys and values; several streams, joined after the last block.
    ("minicpm3", 1, "final"), ("minimax", 2, "none"), ("esmc", 1, "final"), ("gemma4_text", 2, "final"), ("gemma3n_text", 2, "final"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("model_type", "layer", "norm"), UNCUT)
def test_model_whose_layers_a_cut_would_change_is_read_with_hooks(
    model_type: str, layer: int, norm: Norm, tmp_path: Path
) -> None:
    if model_type not in tiny_types.registered():
        pytest.skip(f"this transformers has no {model_type}")
    model, medium, processor = tiny_types.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), layer, norm=norm, device="cpu")
    assert len(encoder.transformer.layers) == 4  # type: ignore[arg-type]
    assert largest_error(encoder, model, medium, processor, layer, norm) < tiny_types.TOLERANCE
    with pytest.raises(MidlayerError, match="is not cut, because a cut would change its layers"):
        encoder.save_pretrained(str(tmp_path / "plain"))


@pytest.mark.long
def test_streams_of_states_are_read_one_layer_at_a_time(tmp_path: Path) -> None:
    tiny_types.build("gemma3n_text", tmp_path)
    encoder = LayerEncoder(str(tmp_path), -1, device="cpu")
    with pytest.raises(OptionError, match="changes its states after its last block"):
        encoder.encode_layers(tiny_types.TEXTS)


REFUSED = [
    ("big_bird", -1, {}, "A forward pass changes BigBirdModel itself .*original_full"),
    ("rwkv", -1, {}, "A forward pass changes RwkvModel itself .*rescale_every"),
    ("bamba", -1, {"bidirectional": True}, "those of blocks 1, 3 see only those before them"),
    ("mpt", 2, {"bidirectional": True}, "it does not run without its mask"),
    ("squeezebert", -1, {}, "bypasses hooks"),
    ("swin", -1, {}, "a model of several stages"),
    ("canine", -1, {}, "an unknown module changes them"),
    ("canine", -1, {"norm": "none"}, "gives other states for layer 4"),
    # Several streams, side by side in the width of the states, which a module joins after the last block.
    ("qwen4_exp_text", 0, {}, "an unknown module changes them"),
]


@pytest.mark.parametrize(("model_type", "layer", "options", "message"), REFUSED)
def test_models_that_cannot_be_exact_are_refused(
    model_type: str, layer: int, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if model_type not in tiny_types.registered():
        pytest.skip(f"this transformers has no {model_type}")
    tiny_types.build(model_type, tmp_path)
    with pytest.raises(MidlayerError, match=message):
        LayerEncoder(str(tmp_path), layer, device="cpu", **options)


def test_unlisted_family_that_breaks_an_assumption_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_types.build("xlnet", tmp_path)
    monkeypatch.setattr(anatomy, "_AXES", {})
    with pytest.raises(MidlayerError, match="gives other states for layer 4"):
        LayerEncoder(str(tmp_path), -1, device="cpu")


@pytest.mark.parametrize("model_type", ["openai-gpt", "xlnet"])
def test_all_layers_come_from_one_pass(model_type: str, tmp_path: Path) -> None:
    model, medium, processor = tiny_types.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), -1, device="cpu")
    inputs = [tiny_types.prepared(processor, medium, item) for item in tiny_types.TEXTS]
    uncut = find_stack(model, inputs[0])
    expected = [
        torch.stack([states[0].mean(dim=0) for states in uncut.layers(item_inputs)["final"]]) for item_inputs in inputs
    ]
    vectors = layer_reader(encoder).vectors(tiny_types.TEXTS, batches_of(encoder, tiny_types.TEXTS))
    assert tiny_types.error(vectors, torch.stack(expected, dim=1)) < tiny_types.TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("big_bird", {"attention_type": "original_full"}),
        pytest.param("rwkv", {"rescale_every": 0}, marks=pytest.mark.slow),
    ],
)
def test_suggested_fix_of_a_refusal_works(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    import transformers as tf

    model, medium, processor = tiny_types.build(model_type, tmp_path)
    config = tf.AutoConfig.from_pretrained(tmp_path)
    for name, value in settings.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    model = tf.AutoModel.from_pretrained(tmp_path)
    encoder = LayerEncoder(str(tmp_path), 3, device="cpu")
    assert largest_error(encoder, model, medium, processor, 3, "final") < tiny_types.TOLERANCE


def test_model_without_a_causal_mask_is_refused(tmp_path: Path) -> None:
    tiny_types.build("bert", tmp_path)
    with pytest.raises(OptionError, match="no causal mask to turn off"):
        LayerEncoder(str(tmp_path), 2, bidirectional=True, device="cpu")


def test_folder_whose_vectors_depend_on_padding_is_not_saved(tmp_path: Path) -> None:
    tiny_types.build("fnet", tmp_path / "whole")
    encoder = LayerEncoder(str(tmp_path / "whole"), 2, device="cpu")
    with pytest.raises(MidlayerError, match=r"(?i)padding changes the states of a text"):
        encoder.save_pretrained(str(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("uncut_error", "refusal", "expected"),
    [
        (None, "BartModel changes its states", "refused"),
        ("RuntimeError: shapes", f"BartModel {census._FAILED}: shapes", "not examined"),
        (
            "TypeError: forward() missing 1 required positional argument: 'grid_thw'",
            f"A {census._FAILED}: …",
            "refused",
        ),
        ("RuntimeError: shapes", "BartModel accepts neither text nor images", "refused"),
        (None, "`model` must hold a tokenizer or processor that transformers can read", "not examined"),
    ],
)
def test_verdict_separates_refusals_from_types_that_were_not_examined(
    uncut_error: str | None, refusal: str, expected: str
) -> None:
    result: dict[str, Any] = {"layers": {"final 0": {"refused": refusal}}}
    if uncut_error is not None:
        result["no_oracle"] = uncut_error
    assert census.verdict(result)[0] == expected


@pytest.mark.slow
def test_every_model_type_is_exact_or_refused() -> None:
    results = list(census.census(tiny_types.registered(), workers=2, seconds=1e9))
    failures = {result["type"]: result["why"] for result in results if result["verdict"] in ("wrong", "raised")}
    assert not failures
    assert sum(result["verdict"] == "exact" for result in results) >= 220
