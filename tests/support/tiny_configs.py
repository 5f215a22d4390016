"""Tiny models of any type that transformers registers: its default config, shrunk by the names of its settings.

Stacks stay heterogeneous: if a config lists a kind for each block, every kind is kept. All weights, norms and biases are
random, so that a missed norm or an off-by-one index is detected.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tests.support.families import DEPTH, VOCAB, WIDTH

POSITIONS = 256
WINDOW = 8
IMAGE, PATCH = 16, 4
MOST_PARAMETERS = 100_000_000

# The first pattern that fits the whole name of a setting gives its value.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(num_|n_)?(text_)?(encoder_|decoder_|hidden_)?(hidden_)?layers?|n_layer|depth|num_blocks", DEPTH),
    (r"(num_|n_)?(mtp|nextn|next_n).*", 0),
    (r".*(key_value_heads|kv_heads|key_heads|num_groups|n_groups|num_key_value_groups)|mamba_ngroups", 2),
    (r".*(_heads?|_headers|heads)", 4),
    (r".*(head_dim|_dim_head|d_head|d_kv|attention_head_size|key_dim_per_head|kv_channels|key_length|head_size)", 8),
    (r".*lora_rank|.*_lora_dim|.*rank_dim", 16),
    (r"(vocab|text_vocab)_size|vocab_size_or_config_json_file", VOCAB),
    (r".*(experts_per_tok(en)?|top_k|topk|num_selected_experts|num_experts_per_tok|moe_k)", 2),
    (r"n_group|topk_group|num_expert_group|router_n_groups", 1),
    (r".*(num|n)_(shared|null|zero)_?experts?", 1),
    (r".*experts", 4),
    (r".*(intermediate_size|ffn_dim|d_ff|d_inner|hidden_dim|mlp_dim|ffn_hidden_size|mlp_hidden_size)(_mlp)?", 64),
    (r"lru_width|(mamba_|ssm_)?(d_ssm)", WIDTH),
    (r".*(state_size|d_state|state_dim|ssm_state)", 8),
    (r".*chunk_size", WINDOW),
    (r"(image|input|img)_size|.*_resolution", IMAGE),
    (r"patch_size", PATCH),
    (r".*(max_position_embeddings|n_positions|max_target_positions|max_seq_len(gth)?|n_ctx|seq_length|model_max_length)", POSITIONS),
    (r"(sliding|local|attention)_?(window|attention|chunk)(_size|_length)?|window_size|block_size|attention_chunk_size|local_block_size", WINDOW),
    (r"rotary_dim", 4),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups", 2),
    (r"projection_dim|.*word_embed_proj_dim", WIDTH),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|emb_dim|d_embed|output_size|embedding_dim|model_dim|hidden_channels|output_dim)(_per_layer_input)?|dim|width|out_channels|codebook_dim|cross_attention_dim|embed_proj_dim", WIDTH),
    (r"max_source_positions", 20),
    (r".*(num_mel_bins|mel_bins|n_mels|num_mel_filters)", 8),
    (r".*(period|interval|every_n_layers|every_n|_pattern|_freq|_frequency|sparse_step|layer_step|_stride_layers)", 2),
    (r"attn_layer_offset|expert_layer_offset", 1),
    (r"first_k_dense_replace|num_dense_layers|n_dense_layers|moe_num_dense.*|first_.*dense.*", 1),
)  # fmt: skip
_TOKENS = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 3, "sep_token_id": 2, "cls_token_id": 3}
_KEPT = re.compile(r".*(_ratio|_token_id|_token_index|conv_kernel|num_channels|id2label|label2id|dropout|num_labels)$")


# What the rules above cannot guess: settings that must fit one another, or have no default. ``...`` drops one.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 8}
_SWIN = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 2}
_ROPE_BY_KIND = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "kimi_linear": {"num_experts_per_token": 2},
    **{kind: {"image_size": 64} for kind in ("convnext", "convnextv2", "dinov3_convnext", "efficientnet", "glpn", "pvt", "segformer", "levit", "mobilevit", "mobilevitv2")},
    "cosmos3_edge": {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "cosmos3_edge_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4, "num_attention_heads": 4},
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32, "hidden_size": 32},
    "esmc": {"num_key_value_heads": 4, "mask_token_id": 1, "vocab_size": VOCAB},
    "gemma3n_text": {"vocab_size_per_layer_input": VOCAB, "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0},
    "gemma4": {"text_config.vocab_size_per_layer_input": VOCAB, "text_config.num_kv_shared_layers": 0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "bailing_hybrid": {"num_experts_per_token": 2},
    "mistral4": {"rope_parameters.partial_rotary_factor": 1.0},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}},
    "hunyuan_vl": {"text_config.head_dim": 8, "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}},
    "qwen2_5_omni_thinker": {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "step3p7": {"text_config.sliding_window": WINDOW},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_KIND},
    "cohere_compass": {"text_config.rope_parameters": _ROPE_BY_KIND},
    "neomme": {"rope_parameters.full_attention.partial_rotary_factor": 0.5, "per_layer_config": {"1": {"sliding_window": None}, "3": {"sliding_window": None}}},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXER.items()},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "donut-swin": _SWIN,
    "maskformer-swin": _SWIN,
    "swin": _SWIN,
    "swinv2": _SWIN,
    "swin2sr": _SWIN,
    "esm": {"vocab_size": VOCAB, "mask_token_id": 1, "position_embedding_type": "rotary", "token_dropout": False, "is_folding_model": False},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "funnel": {"block_sizes": [2, 2], "block_repeats": [1, 1], "num_decoder_layers": 1},
    "glm5_next": {"text_config.num_key_value_heads": 4},
    "glm5_next_text": {"num_key_value_heads": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longformer": {"attention_window": [WINDOW] * DEPTH},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh", "local", "lsh"], "attention_head_size": 8, "is_decoder": False},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_d_state": 8, "n_mamba_heads": 2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "timm_wrapper": {"architecture": "vit_tiny_patch16_224", "model_args": {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": 4, "img_size": IMAGE, "patch_size": PATCH}},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX", "de_DE"], "adapter_reduction_factor": 2},
    "zamba2": {"mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "attention_hidden_size": 64, "attention_head_dim": 16, "num_mem_blocks": 2, "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba"], "hybrid_layer_ids": [1, 2], "chunk_size": 8, "add_bias_linear": True, "adapter_rank": 8},
    "vit_mae": {"mask_ratio": 0.0},  # an encoder shows it every patch
    "vits": {"upsample_initial_channel": 32},
    "xlnet": {"d_head": 8, "n_head": 4, "d_model": 32, "d_inner": 64},
}  # fmt: skip


def shrunk(fields: Mapping[str, Any], depth: int = DEPTH) -> dict[str, Any]:
    """Return the settings of a config with small sizes; configs inside it become small too."""
    old = next((fields[n] for n in _COUNTS if isinstance(fields.get(n), int)), None)
    made: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _STAGES:
            continue
        if name == "per_layer_config" and value:  # settings of some blocks, by their place
            kinds = with_every_kind([value.get(str(n), value.get(n)) for n in range(old or 0)], depth)
            made[name] = {str(place): kind for place, kind in enumerate(kinds) if kind is not None}
        elif isinstance(value, Mapping) and ("model_type" in value or name.endswith("_config")):
            made[name] = shrunk(value, DEPTH if "text" in name else DEPTH - 1)
        elif name in _TOKENS:
            made[name] = _TOKENS[name]
        elif isinstance(value, int) and not isinstance(value, bool):
            made[name] = _small(name, value, depth)
        elif name in ("image_size", "input_size") and isinstance(value, list | tuple):
            made[name] = [IMAGE] * len(value)
        elif name in ("conv_dim", "tdnn_dim"):
            made[name] = [16] * len(value)
        elif isinstance(value, list | tuple) and len(value) == old and old > 1:
            made[name] = with_every_kind(value, depth)
        else:
            made[name] = value
    if made.get("kv_lora_rank") or made.get(
        "qk_rope_head_dim"
    ):  # latent attention: one head of keys for each of queries
        made |= {name: 4 for name in ("num_key_value_heads",) if name in made}
        made |= {name: 16 for name in ("qk_head_dim",) if name in made}
    rope = made.get("rope_parameters")
    sections = re.match(
        r"glm.*(4v|ocr|image).*text|qwen2(_5)?_vl_text|paddleocr_vl_text", str(made.get("model_type"))
    )  # a default that only their code knows
    if isinstance(rope, Mapping) and (sections or "mrope_section" in rope):
        made["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
        made["head_dim"] = 8
    return made


_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depth")


# One for each block, or made anew when absent: what a backbone hands out.
_STAGES = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices")


def _small(name: str, value: int, depth: int) -> int:
    if re.fullmatch(r".*_token_(id|index)|.*_token", name):
        return value if value < VOCAB else VOCAB - 1 - sum(map(ord, name)) % 20
    if _KEPT.match(name):
        return value
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            if size == POSITIONS:
                return POSITIONS
            return min(value, depth if size == DEPTH and "layer" in name else size) if value > 0 else value
    return value


def with_every_kind(values: Sequence[Any], depth: int) -> list[Any]:
    """Return a list for ``depth`` blocks with every kind of a longer one, in turn."""
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    return [kinds[index % len(kinds)] for index in range(depth)] if len(kinds) <= depth else list(values[:depth])


def tiny_config(model_type: str) -> Any:
    """Return the default config of a model type, shrunk, with the settings the type needs."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    fields = shrunk(config_class().to_dict())
    for path, value in SETTINGS.get(model_type, {}).items():
        inner = fields
        *above, name = path.split(".")
        for part in above:
            inner = inner[part]
        if value is ...:
            inner.pop(name, None)
        else:
            inner[name] = value
    return config_class.from_dict(fields)


def randomized(model: nn.Module, seed: int = 0, scale: float = 1.0) -> nn.Module:
    """Set every weight, norm and bias of a model to a random value small enough to keep its states finite."""
    generator = torch.Generator().manual_seed(seed)
    randomized_ids: set[int] = set()
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in randomized_ids or not parameter.is_floating_point():
                continue
            randomized_ids.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
            if parameter.ndim < 2:
                parameter.add_(0.2 * scale * noise)
            elif scale == 1.0:
                parameter.copy_(
                    noise / max(1, parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]) ** 0.5
                )
            else:
                parameter.add_(0.1 * scale * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("running_var"):
                buffer.mul_(1 + torch.rand(buffer.shape, generator=generator))
    return model.eval()
