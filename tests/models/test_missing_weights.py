"""Files that lack weights: an encoder is refused unless what is missing makes no difference to its states."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import ModelNotFoundError
from midlayer_encoders.models.load import load_cut
from tests.families import DEPTH, FAMILIES, JOINT, inputs, tiny, tiny_joint

BLOCK = re.compile(r"(^|\.)(layers?|h|block|albert_layer_groups)\.\d+\.")  # in the files, where names may be older


def leave_out(folder: Path, unwanted: Callable[[str], bool], *, shards: int = 1) -> list[str]:
    """Write the folder's weights again without some of them, in one file or several; return the names left out."""
    weights = load_file(folder / "model.safetensors")
    out = sorted(key for key in weights if unwanted(key))
    kept = sorted(weights.keys() - set(out))
    (folder / "model.safetensors").unlink()
    if shards == 1:
        save_file({key: weights[key] for key in kept}, folder / "model.safetensors", metadata={"format": "pt"})
        return out
    index = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({key: weights[key] for key in kept[shard::shards]}, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(kept[shard::shards], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return out


def used(model: nn.Module, output: Callable[[], torch.Tensor]) -> set[str]:
    """Return the parameters on which the output depends, by its gradient."""
    model.requires_grad_(True)
    made = output()
    (made * torch.randn(made.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    named = model.named_parameters(remove_duplicate=False)  # a weight that is tied to another is missing with it
    return {name for name, value in named if value.grad is not None and bool(value.grad.any())}


def error_names(folder: Path, layer: int) -> tuple[int, list[str]]:
    """Return how many weights the refusal counts, and those that it names."""
    with pytest.raises(ModelNotFoundError, match="must hold every weight of") as caught:
        load_cut(str(folder), layer)
    count, names = re.search(r"but lack (\d+): (.*?)(?: and \d+ more)?\. They may be", str(caught.value)).groups()  # type: ignore[union-attr]
    return int(count), names.split(", ")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("norm", "kept"), [("final", 2), ("none", 3)])
@pytest.mark.parametrize("block", range(DEPTH))
def test_each_block_that_is_kept_must_be_there_and_no_other(
    block: int, norm: Norm, kept: int, shards: int, tmp_path: Path
) -> None:
    tiny("Llama").save_pretrained(tmp_path)  # type: ignore[operator]
    lost = leave_out(tmp_path, lambda key: key.startswith(f"layers.{block}."), shards=shards)
    assert len(lost) == 9
    if block < kept:
        with pytest.raises(ModelNotFoundError, match=rf"of LlamaModel, but lack 9: layers\.{block}\.input_layernorm"):
            load_cut(str(tmp_path), 2, norm=norm)
        return
    loaded, _ = load_cut(str(tmp_path), 2, norm=norm)
    whole = tiny("Llama").state_dict()
    assert {key: torch.equal(value, whole[key]) for key, value in loaded.state_dict().items()} == dict.fromkeys(
        loaded.state_dict(), True
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if place % 2 else []) for place, name in enumerate(FAMILIES)]
)
def test_what_the_states_depend_on_outside_the_blocks_must_be_there_and_nothing_else(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    needed = used(model, lambda: model(**inputs(name)).last_hidden_state)
    model.save_pretrained(tmp_path / "none")  # type: ignore[operator]
    lost = leave_out(tmp_path / "none", lambda key: not BLOCK.search(key))
    wanted = sorted(key for key in needed if not BLOCK.search(key))
    assert wanted
    assert error_names(tmp_path / "none", DEPTH) == (len(wanted), wanted[:10])
    if not set(lost) <= set(wanted):
        model.save_pretrained(tmp_path / "all")  # type: ignore[operator]
        leave_out(tmp_path / "all", lambda key: key in lost and key not in wanted)
        loaded, _ = load_cut(str(tmp_path / "all"), DEPTH)
        with torch.no_grad():
            torch.testing.assert_close(
                loaded(**inputs(name)).last_hidden_state, model(**inputs(name)).last_hidden_state
            )


@pytest.mark.parametrize("name", JOINT)
def test_a_joint_model_needs_its_heads_too(name: str, tmp_path: Path) -> None:
    model = tiny_joint(name)
    ids = torch.tensor([[3, 9, 7, 2]])
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    needed = used(model, lambda: model.get_text_features(ids).pooler_output)  # type: ignore[operator]
    needed |= used(model, lambda: model.get_image_features(pixels).pooler_output)  # type: ignore[operator]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    unread = leave_out(tmp_path, lambda key: key not in needed)
    assert set(unread) <= {"logit_scale", "logit_bias"}
    load_cut(str(tmp_path), -1)
    heads = [key for key in needed if ".encoder.layers." not in key and "embed" not in key]
    assert len(heads) >= 4
    leave_out(tmp_path, lambda key: key in heads)
    count, named = error_names(tmp_path, -1)
    assert (count, named) == (len(heads), sorted(heads)[:10])


HEADED = {  # classes that write the files on the hub; some have no pooler, some have a decoder too
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


@pytest.mark.parametrize(("name", "kind"), [*HEADED.items(), ("Whisper", "WhisperModel")])
def test_files_of_a_model_with_a_head_are_read_weight_for_weight(name: str, kind: str, tmp_path: Path) -> None:
    import transformers as tf

    with torch.random.fork_rng():
        torch.manual_seed(5)
        whole = getattr(tf, kind)(tiny(name).config)
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    whole.save_pretrained(tmp_path)
    tensors = dict(whole.state_dict())
    loaded, _ = load_cut(str(tmp_path), 2)
    for key, value in loaded.state_dict().items():
        if "pooler" not in key:
            assert any(f".{held}".endswith(f".{key}") and value.equal(other) for held, other in tensors.items()), key


def test_a_file_of_weights_that_is_not_there_or_damaged_is_refused(tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path)  # type: ignore[operator]
    leave_out(tmp_path, lambda _: False, shards=3)
    second = tmp_path / "model-00002-of-00003.safetensors"
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(ModelNotFoundError, match=r"weights of .* cannot be read"):
        load_cut(str(tmp_path), 2)
    second.unlink()
    with pytest.raises(ModelNotFoundError, match=r"cannot be read.*00002-of-00003"):
        load_cut(str(tmp_path), 2)
