"""Blocks with fused norms and rotations, compared with transformers' own."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder import sentence_transformers_encoder
from midlayer_encoders.extras.kernels import fused_blocks as fused
from midlayer_encoders.reading.fused import fused_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and DEVICE == "cpu"
IDS = torch.arange(24).reshape(2, 12) % 17 + 1


def make(config_class: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    common = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = config_class(**common, intermediate_size=64, max_position_embeddings=64, pad_token_id=0, **options)
    return perturbed(config)


def perturbed(config: Any) -> nn.Module:
    model: nn.Module = tf.AutoModel.from_config(config).eval().to(DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def states(model: nn.Module) -> Tensor:
    hidden = model(input_ids=IDS.to(DEVICE), output_hidden_states=True).hidden_states
    return torch.stack(hidden)


def replaced(model: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model.named_modules() if "forward" in vars(module)}


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
CONFIGS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: make(tf.LlamaConfig, num_key_value_heads=2),
    "Qwen3": lambda: make(tf.Qwen3Config, num_key_value_heads=2, head_dim=8),
    "Phi3": lambda: make(tf.Phi3Config),
    "GPTNeoX": lambda: make(tf.GPTNeoXConfig),
    "ModernBERT": lambda: make(tf.ModernBertConfig),
    "Cohere": lambda: make(tf.CohereConfig),
    "Gemma3": lambda: make(tf.Gemma3TextConfig, num_key_value_heads=2, head_dim=8),
    "BERT": lambda: make(tf.BertConfig),
    # One tensor to rotate; a norm with a gate; a norm of a part of the states.
    "GPTJ": lambda: perturbed(tf.GPTJConfig(vocab_size=32, n_embd=32, n_layer=3, n_head=4, rotary_dim=4)),
    "Bamba": lambda: make(tf.BambaConfig, num_key_value_heads=2, attn_layer_indices=[1], **MAMBA),
    "FalconMamba": lambda: perturbed(
        tf.FalconMambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=3, state_size=8)
    ),
}
NUM_ROTATIONS = {"BERT": 0, "GPTJ": 0, "FalconMamba": 0, "Bamba": 1}
NORMS_PER_BLOCK = {"Llama": 2, "Qwen3": 4, "Phi3": 2}  # beside the last one; Gemma's weights are offsets from one


@pytest.mark.parametrize("name", CONFIGS)
def test_states_differ_by_rounding(name: str) -> None:
    model = CONFIGS[name]()
    with torch.inference_mode():
        expected = states(model)
        with fused._replace_forwards(model):
            kinds = list(replaced(model).values())
            actual = states(model)
    assert replaced(model) == {}
    assert (
        sum("RMSNorm" in kind for kind in kinds) == 3 * NORMS_PER_BLOCK.get(name, -1) + 1 or name not in NORMS_PER_BLOCK
    )
    assert sum("Attention" in kind for kind in kinds) == NUM_ROTATIONS.get(name, 3)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_recorded_by_the_plain_functions() -> None:
    model = CONFIGS["Llama"]()
    expected = torch.autograd.grad(states(model).square().sum(), list(model.parameters()))
    with fused._replace_forwards(model):
        actual = torch.autograd.grad(states(model).square().sum(), list(model.parameters()))
    assert all(map(torch.equal, actual, expected))


def test_forward_functions_return_after_an_error_and_stay_in_an_outer_block() -> None:
    model = CONFIGS["Llama"]()
    own = model.norm.forward
    model.norm.forward = own  # a user's own function
    with suppress(ZeroDivisionError), fused._replace_forwards(model):
        inside = replaced(model)
        with fused._replace_forwards(model):
            pass
        assert replaced(model) == inside
        raise ZeroDivisionError
    assert replaced(model) == {"norm": "LlamaRMSNorm"}
    assert model.norm.forward is own


def test_without_a_gpu_nothing_changes() -> None:
    model = CONFIGS["Llama"]().cpu()
    with torch.inference_mode(), fused_blocks(model):
        assert replaced(model) == {}
        assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.long
def test_compiled_encoder_is_not_fused(tiny_folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentence_transformers_encoder, "fused_blocks", fused._replace_forwards)
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    expected = encoder.encode(["one text"])
    encoder.compile(backend="eager")
    assert np.allclose(encoder.encode(["one text"]), expected, atol=1e-6)


def test_norm_of_another_form_is_not_fused() -> None:
    class DoubledRMSNorm(LlamaRMSNorm):
        def forward(self, hidden: Tensor) -> Tensor:
            return 2 * super().forward(hidden)

    assert fused._is_rms_norm(LlamaRMSNorm(32))
    assert not fused._is_rms_norm(DoubledRMSNorm(32))
    assert not fused._is_rms_norm(nn.LayerNorm(32))


@pytest.mark.gpu
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or Triton's interpreter")
# Triton's interpreter rounds to bfloat16 in its own way.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (not INTERPRETED), ids=str)
@pytest.mark.parametrize(("q_heads", "k_heads", "width"), [(4, 2, 16), (3, 1, 24), (12, 12, 64)])
def test_rotation_by_the_kernel_is_bitwise_equal(q_heads: int, k_heads: int, width: int, dtype: torch.dtype) -> None:
    rotation = fused._Rotation(apply_rotary_pos_emb)
    assert rotation._agrees(torch.device(DEVICE), dtype, q_heads, k_heads, width)


@pytest.mark.gpu
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or Triton's interpreter")
def test_kernel_takes_over_where_it_agrees() -> None:
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 5, heads, 16, generator=draw).to(DEVICE).transpose(1, 2) for heads in (4, 2))
    for tables in (1, 2):
        cos, sin = torch.randn(2, tables, 5, 16, generator=draw).to(DEVICE)
        for plain, used in ((apply_rotary_pos_emb, True), (interleaved, False)):
            rotation = fused._Rotation(plain)
            with torch.inference_mode():
                expected = plain(q, k, cos, sin)
                assert all(map(torch.equal, rotation(q, k, cos, sin), expected))
                (trial,) = rotation._trials.values()
                assert trial.result() is used
                assert all(map(torch.equal, rotation(q, k, cos, sin), expected))


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Rotate neighboring dimensions, as GPT-J does."""

    def rotate(states: Tensor) -> Tensor:
        turned = torch.stack([-states[..., 1::2], states[..., ::2]], dim=-1).flatten(-2)
        return states * cos[:, None] + turned * sin[:, None]

    return rotate(q), rotate(k)
