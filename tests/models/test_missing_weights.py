"""Files that lack weights: an encoder is refused unless the missing weights do not affect its states."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import ModelNotFoundError
from midlayer_encoders.extras.joint.loading import load_towers
from midlayer_encoders.models.hub import Location
from midlayer_encoders.models.load import open_model
from tests.models.cuts import load_and_cut
from tests.support.families import DEPTH, FAMILIES, JOINT, inputs, tiny, tiny_joint

BLOCK = re.compile(r"(^|\.)(layers?|h|block|albert_layer_groups)\.\d+\.")  # in the files, which may use older names


def remove_weights(folder: Path, should_remove: Callable[[str], bool], *, shards: int = 1) -> list[str]:
    """Rewrite the folder's weights without some of them, in one or several files; return the removed names."""
    weights = load_file(folder / "model.safetensors")
    removed = sorted(key for key in weights if should_remove(key))
    remaining = sorted(weights.keys() - set(removed))
    (folder / "model.safetensors").unlink()
    if shards == 1:
        save_file({key: weights[key] for key in remaining}, folder / "model.safetensors", metadata={"format": "pt"})
        return removed
    index = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({key: weights[key] for key in remaining[shard::shards]}, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(remaining[shard::shards], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return removed


def used_parameters(model: nn.Module, output: Callable[[], torch.Tensor]) -> set[str]:
    """Return the parameters with a nonzero gradient of the output."""
    model.requires_grad_(True)
    values = output()
    (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    parameters = model.named_parameters(remove_duplicate=False)  # tied weights are missing together
    return {name for name, value in parameters if value.grad is not None and bool(value.grad.any())}


def missing_weights_in_error(
    folder: Path, layer: int, load: Callable[[str, int], Any] = load_and_cut
) -> tuple[int, list[str]]:
    """Return the number of missing weights in the error and the names it lists."""
    with pytest.raises(ModelNotFoundError, match="must hold every weight of") as caught:
        load(str(folder), layer)
    pattern = r"but lack (\d+): (.*?)(?: and (\d+) more)?\. They may be"
    count, listed, more = re.search(pattern, str(caught.value)).groups()  # type: ignore[union-attr]
    names = listed.split(", ")
    assert int(count) == len(names) + int(more or 0)
    return int(count), names


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("norm", "num_blocks"), [("final", 2), ("none", 3)])
@pytest.mark.parametrize("block", range(DEPTH))
def test_blocks_up_to_the_layer_are_required_and_no_others(
    block: int, norm: Norm, num_blocks: int, shards: int, tmp_path: Path
) -> None:
    tiny("Llama").save_pretrained(tmp_path)  # type: ignore[operator]
    removed = remove_weights(tmp_path, lambda key: key.startswith(f"layers.{block}."), shards=shards)
    assert len(removed) == 9
    if block < num_blocks:
        with pytest.raises(ModelNotFoundError, match=rf"of LlamaModel, but lack 9: layers\.{block}\.input_layernorm"):
            load_and_cut(str(tmp_path), 2, norm=norm)
        return
    loaded, _ = load_and_cut(str(tmp_path), 2, norm=norm)
    full_state = tiny("Llama").state_dict()
    assert {key: torch.equal(value, full_state[key]) for key, value in loaded.state_dict().items()} == dict.fromkeys(
        loaded.state_dict(), True
    )


@pytest.mark.parametrize(
    "name",
    [
        # SigLIP's final norm has the name of a head in other families.
        pytest.param(name, marks=[pytest.mark.slow] if position % 2 and name != "SigLIP" else [])
        for position, name in enumerate(FAMILIES)
    ],
)
def test_weights_outside_the_blocks_are_required_if_the_states_depend_on_them(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    needed = used_parameters(model, lambda: model(**inputs(name)).last_hidden_state)
    model.save_pretrained(tmp_path / "none")  # type: ignore[operator]
    removed = remove_weights(tmp_path / "none", lambda key: not BLOCK.search(key))
    required = sorted(key for key in needed if not BLOCK.search(key))
    assert required
    assert missing_weights_in_error(tmp_path / "none", DEPTH) == (len(required), required[:10])
    if not set(removed) <= set(required):
        model.save_pretrained(tmp_path / "all")  # type: ignore[operator]
        remove_weights(tmp_path / "all", lambda key: key in removed and key not in required)
        loaded, _ = load_and_cut(str(tmp_path / "all"), DEPTH)
        with torch.no_grad():
            torch.testing.assert_close(
                loaded(**inputs(name)).last_hidden_state, model(**inputs(name)).last_hidden_state
            )


def load_joint(folder: str, layer: int) -> Any:
    """Return the model and the cuts of both towers."""
    return load_towers(open_model(Location(folder)), layer)


@pytest.mark.parametrize("name", JOINT)
def test_joint_model_requires_its_heads(name: str, tmp_path: Path) -> None:
    model = tiny_joint(name)
    ids = torch.tensor([[3, 9, 7, 2]])
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    needed = used_parameters(model, lambda: model.get_text_features(ids).pooler_output)  # type: ignore[operator]
    needed |= used_parameters(model, lambda: model.get_image_features(pixels).pooler_output)  # type: ignore[operator]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    removed = remove_weights(tmp_path, lambda key: key not in needed)
    assert set(removed) <= {"logit_scale", "logit_bias"}
    load_joint(str(tmp_path), -1)
    heads = [key for key in needed if ".encoder.layers." not in key and "embed" not in key]
    assert len(heads) >= 4
    remove_weights(tmp_path, lambda key: key in heads)
    count, listed = missing_weights_in_error(tmp_path, -1, load_joint)
    assert (count, listed) == (len(heads), sorted(heads)[:10])


CLASSES_WITH_HEAD = {  # classes that wrote the files on the hub; some have no pooler, some also have a decoder
    "Llama": "LlamaForCausalLM",
    "GPTNeoX": "GPTNeoXForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "OPT": "OPTForCausalLM",
    "Mamba": "MambaForCausalLM",
    "BERT": "BertForMaskedLM",
    "RoBERTa": "RobertaForMaskedLM",
    "DistilBERT": "DistilBertForMaskedLM",
    "DeBERTaV2": "DebertaV2ForMaskedLM",
    "ModernBERT": "ModernBertForMaskedLM",
    "ALBERT": "AlbertForMaskedLM",
    "T5": "T5ForConditionalGeneration",
    "ViT": "ViTForImageClassification",
    "ViTMAE": "ViTMAEForPreTraining",
    "BEiT": "BeitForMaskedImageModeling",
    "DINOv2": "Dinov2ForImageClassification",
    "ImageGPT": "ImageGPTForCausalImageModeling",
    "Wav2Vec2": "Wav2Vec2ForCTC",
    "HuBERT": "HubertForCTC",
    "WavLM": "WavLMForSequenceClassification",
    "Whisper": "WhisperForConditionalGeneration",
}


@pytest.mark.parametrize(("name", "class_name"), [*CLASSES_WITH_HEAD.items(), ("Whisper", "WhisperModel")])
def test_files_of_a_model_with_a_head_are_read_exactly(name: str, class_name: str, tmp_path: Path) -> None:
    import transformers as tf

    with torch.random.fork_rng():
        torch.manual_seed(5)
        full_model = getattr(tf, class_name)(tiny(name).config)
        with torch.no_grad():
            for parameter in full_model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    full_model.save_pretrained(tmp_path)
    tensors = dict(full_model.state_dict())
    loaded, _ = load_and_cut(str(tmp_path), 2)
    for key, value in loaded.state_dict().items():
        if "pooler" not in key:
            assert any(
                f".{name_in_file}".endswith(f".{key}") and value.equal(tensor)
                for name_in_file, tensor in tensors.items()
            ), key


def test_missing_or_damaged_weight_file_is_refused(tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path)  # type: ignore[operator]
    remove_weights(tmp_path, lambda _: False, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelNotFoundError, match=r"weights of .* cannot be read"):
        load_and_cut(str(tmp_path), 2)
    shard.unlink()
    with pytest.raises(ModelNotFoundError, match=r"cannot be read.*00002-of-00003"):
        load_and_cut(str(tmp_path), 2)
