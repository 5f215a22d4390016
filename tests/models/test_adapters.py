"""PEFT adapters, including those of a model with a head, are merged completely or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import MidlayerError, ModelNotFoundError, OptionError
from tests.support.tiny_folders import TEXTS, tokenizer

peft = pytest.importorskip("peft")

KINDS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "causal LM": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "random initialization": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj"]),
    "LayerNorms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "with the head": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "with embeddings": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
    "of a removed block": lambda: peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[3]),
}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "base"
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_adapter(base_folder: Path, config: Any, path: Path, model_class: Any = tf.AutoModelForCausalLM) -> Any:
    """Save an adapter in which every weight differs from its initial value, and return the full model with it merged."""
    adapted = peft.get_peft_model(model_class.from_pretrained(base_folder), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    adapted.save_pretrained(path)
    return adapted.merge_and_unload().eval()


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # from PEFT, about norms
@pytest.mark.parametrize("kind", KINDS)
def test_adapter_of_a_model_with_a_head_is_merged(kind: str, base_folder: Path, tmp_path: Path) -> None:
    merged = save_adapter(base_folder, KINDS[kind](), tmp_path)
    for layer, norm in ((2, "none"), (4, "final")):
        encoder = LayerEncoder(str(base_folder), layer, norm=norm, adapters=[str(tmp_path)], device="cpu")  # type: ignore[arg-type]
        with torch.no_grad():
            states = merged(**encoder.tokenizer(TEXTS[:1], return_tensors="pt"), output_hidden_states=True)
        expected = states.hidden_states[layer][0].mean(dim=0).numpy()
        np.testing.assert_allclose(encoder.encode(TEXTS[:1], show_progress_bar=False)[0], expected, atol=2e-5)


def test_adapter_passed_as_the_model_is_refused(base_folder: Path, tmp_path: Path) -> None:
    save_adapter(base_folder, KINDS["LoRA"](), tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"holds a PEFT adapter alone: .* pass adapters=\["):
        LayerEncoder(str(tmp_path), 2)


def test_two_adapters_are_merged_in_order(base_folder: Path, tmp_path: Path) -> None:
    save_adapter(base_folder, KINDS["LoRA"](), tmp_path / "one")
    save_adapter(base_folder, KINDS["LoRA"](), tmp_path / "two", tf.AutoModel)
    names = [str(tmp_path / "one"), str(tmp_path / "two")]
    causal_model = tf.AutoModelForCausalLM.from_pretrained(base_folder)
    causal_model = peft.PeftModel.from_pretrained(causal_model, names[0]).merge_and_unload()
    merged = peft.PeftModel.from_pretrained(causal_model.model, names[1]).merge_and_unload().eval()
    encoder = LayerEncoder(str(base_folder), -1, adapters=names, device="cpu")
    with torch.no_grad():
        expected = merged(**encoder.tokenizer(TEXTS[:1], return_tensors="pt")).last_hidden_state[0].mean(dim=0)
    np.testing.assert_allclose(encoder.encode(TEXTS[:1], show_progress_bar=False)[0], expected.numpy(), atol=2e-5)


def test_adapters_with_virtual_tokens_or_for_another_model_are_refused(base_folder: Path, tmp_path: Path) -> None:
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(tf.AutoModelForCausalLM.from_pretrained(base_folder), prompts).save_pretrained(
        tmp_path / "prompts"
    )
    with pytest.raises(OptionError, match=r"`adapters` must change weights.*PROMPT_TUNING"):
        LayerEncoder(str(base_folder), 2, adapters=[str(tmp_path / "prompts")], device="cpu")
    config = tf.LlamaConfig(
        vocab_size=40, hidden_size=48, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
    )
    wide = peft.get_peft_model(tf.LlamaForCausalLM(config), KINDS["LoRA"]())
    wide.save_pretrained(tmp_path / "wide")
    config.hidden_size, config.num_hidden_layers = 32, 6
    deep = peft.get_peft_model(tf.LlamaForCausalLM(config), KINDS["LoRA"]())
    deep.save_pretrained(tmp_path / "deep")
    other_family = peft.get_peft_model(
        tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=40)),
        peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True),
    )
    other_family.save_pretrained(tmp_path / "other")
    for name in ("wide", "deep", "other"):
        with pytest.raises(ModelNotFoundError, match=r"The adapter .* (does not fit|is not of) LlamaModel"):
            LayerEncoder(str(base_folder), 2, adapters=[str(tmp_path / name)], device="cpu")


def test_adapter_that_lacks_weights_is_refused(base_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_adapter(base_folder, KINDS["LoRA"](), tmp_path)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    del weights[min(weights)]
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelNotFoundError, match="is not of LlamaModel: it lacks weights, such as"):
        LayerEncoder(str(base_folder), 2, adapters=[str(tmp_path)], device="cpu")


def test_missing_adapter_is_refused(base_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MidlayerError, match="nowhere"):
        LayerEncoder(str(base_folder), 2, adapters=[str(tmp_path / "nowhere")], device="cpu")
