"""Write tiny random models as GGUF files, field by field and tensor by tensor."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, WIDTH, HEADS, GROUPS, HEAD, INNER, BLOCKS, CONTEXT = 304, 64, 4, 2, 16, 96, 4, 1024
_ROPE = {"rope.freq_base": 500.0, "rope.dimension_count": HEAD}
_SIZES = {"context_length": CONTEXT, "embedding_length": WIDTH, "block_count": BLOCKS, "feed_forward_length": INNER}
_RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
_MEAN = {"attention.layer_norm_epsilon": 1e-5}
_GROUPED = {"attention.head_count": HEADS, "attention.head_count_kv": GROUPS}
_HEAD_SIZES = {"attention.key_length": HEAD, "attention.value_length": HEAD}
_LLAMA = _SIZES | _GROUPED | _ROPE | _RMS
_BASIC = _SIZES | _MEAN | {"attention.head_count": HEADS}
_STATE = 2 * WIDTH  # of Mamba

#: Fields of each architecture, without its name; numbers are unsigned, as in most files.
FIELDS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _SIZES | _GROUPED | _RMS | {"rope.freq_base": 500.0},
    "qwen3": _LLAMA | _HEAD_SIZES,
    "gemma": _LLAMA | _HEAD_SIZES,
    "gemma2": _LLAMA | _HEAD_SIZES | {"attention.sliding_window": 8, "attn_logit_softcapping": 5.0},
    "gemma3": _LLAMA | _HEAD_SIZES | {"attention.sliding_window": 8, "block_count": 7},
    "phi3": _LLAMA | {"rope.dimension_count": HEAD // 2},
    "falcon": _SIZES | _MEAN | {"attention.head_count": HEADS, "attention.head_count_kv": 1},
    "stablelm": _SIZES | _GROUPED | _MEAN | {"rope.dimension_count": HEAD // 4, "use_parallel_residual": True},
    "starcoder2": _SIZES | _GROUPED | _MEAN | {"rope.freq_base": 500.0},
    "nemotron": _SIZES | _GROUPED | _MEAN | _RMS | _ROPE | {"rope.dimension_count": HEAD // 2},
    "gpt2": _BASIC,
    "bloom": _BASIC | {"feed_forward_length": 4 * WIDTH},
    "mamba": _RMS
    | {"context_length": CONTEXT, "embedding_length": WIDTH, "block_count": BLOCKS}
    | {"feed_forward_length": 0, "attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": _STATE}
    | {"ssm.state_size": 16, "ssm.time_step_rank": 4},
    "t5encoder": _SIZES
    | _RMS
    | _HEAD_SIZES
    | {"attention.head_count": HEADS, "attention.relative_buckets_count": 32}
    | {"attention.causal": False},
    "bert": _BASIC | {"attention.causal": False},
}
_QKV = {"attn_q": (HEADS * HEAD, WIDTH), "attn_k": (GROUPS * HEAD, WIDTH), "attn_v": (GROUPS * HEAD, WIDTH)}
_OUT = {"attn_output": (WIDTH, HEADS * HEAD)}
_GATED = {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
_PLAIN = {"ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
_NORMS = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
_QK_NORMS = {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)}
_POST_NORMS = {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
_FULL = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
_DECODER = _QKV | _OUT | _GATED | _NORMS
_T5 = {"attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH), "attn_o": (WIDTH, WIDTH)}

#: Weights of a block of each architecture, and names (or their endings) of weights that have a bias.
BLOCK: dict[str, tuple[dict[str, tuple[int, ...]], Collection[str]]] = {
    "llama": (_DECODER, ()),
    "qwen2": (_DECODER, ("attn_q", "attn_k", "attn_v")),
    "qwen3": (_DECODER | _QK_NORMS, ()),
    "gemma": (_DECODER, ()),
    "gemma2": (_DECODER | _POST_NORMS, ()),
    "gemma3": (_DECODER | _POST_NORMS | _QK_NORMS, ()),
    "phi3": (
        _NORMS
        | _OUT
        | {"attn_qkv": ((HEADS + 2 * GROUPS) * HEAD, WIDTH), "ffn_up": (2 * INNER, WIDTH)}
        | {"ffn_down": (WIDTH, INNER)},
        (),
    ),
    "falcon": (_OUT | _PLAIN | {"attn_norm": (WIDTH,), "attn_qkv": ((HEADS + 2) * HEAD, WIDTH)}, ("norm",)),
    "stablelm": (_DECODER, ("norm",)),
    "starcoder2": (_QKV | _OUT | _PLAIN | _NORMS, ("",)),
    "nemotron": (_QKV | _OUT | _PLAIN | _NORMS, ("norm",)),
    "gpt2": (_OUT | _PLAIN | _NORMS | {"attn_qkv": (3 * WIDTH, WIDTH)}, ("",)),
    "bloom": (
        _OUT | _NORMS | {"attn_qkv": (3 * WIDTH, WIDTH), "ffn_up": (4 * WIDTH, WIDTH), "ffn_down": (WIDTH, 4 * WIDTH)},
        ("",),
    ),
    "mamba": (
        {"attn_norm": (WIDTH,), "ssm_in": (2 * _STATE, WIDTH), "ssm_conv1d": (_STATE, 4), "ssm_x": (4 + 32, _STATE)}
        | {"ssm_dt": (_STATE, 4), "ssm_a": (_STATE, 16), "ssm_d": (_STATE,), "ssm_out": (WIDTH, _STATE)},
        ("ssm_conv1d", "ssm_dt"),
    ),
    "t5encoder": (_T5 | _GATED | _NORMS, ()),
    "bert": (_FULL | _PLAIN | {"attn_output_norm": (WIDTH,), "layer_output_norm": (WIDTH,)}, ("",)),
}
_OUTSIDE: dict[str, dict[str, tuple[int, ...]]] = {
    "gpt2": {"position_embd": (CONTEXT, WIDTH)},
    "bloom": {"token_embd_norm": (WIDTH,)},
    "bert": {"position_embd": (CONTEXT, WIDTH), "token_types": (2, WIDTH), "token_embd_norm": (WIDTH,)},
}
_FLOATS = (
    "epsilon",
    "base",
    "base_swa",
    "factor",
    "softcapping",
    "multiplier",
    "scale",
    "linear",
    "alpha",
    "fast",
    "slow",
)


def tensors(arch: str, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return random tensors of an architecture: norms near one, biases and weights near zero."""
    rng = np.random.default_rng(0)
    prefix = "enc." if arch == "t5encoder" else ""
    block, biased = BLOCK[arch]
    shapes = {"token_embd": (VOCAB, WIDTH), **_OUTSIDE.get(arch, {})}
    if arch != "bert":
        shapes |= {f"{prefix}output_norm": (WIDTH,)}
    if arch in ("bloom", "nemotron", "stablelm"):  # their heads are required
        shapes |= {"output": (VOCAB, WIDTH)}
    for number in range(min(fields.get("block_count", BLOCKS), 50)):
        shapes |= {f"{prefix}blk.{number}.{name}": shape for name, shape in block.items()}
    result: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape, scale=0.2).astype(np.float32)
        if name.endswith("ssm_a"):
            values = -np.exp(values)
        weight = name if name.endswith(("ssm_a", "ssm_d")) else f"{name}.weight"
        result[weight] = values + 1 if len(shape) == 1 else values
        last = name.rpartition(".")[2]
        is_table = len(shape) == 2 and "blk." not in name
        if any(last.endswith(ending) for ending in biased) and not is_table:
            result[f"{name}.bias"] = rng.normal(size=shape[0], scale=0.2).astype(np.float32)
    if arch == "t5encoder":
        result["enc.blk.0.attn_rel_b.weight"] = rng.normal(size=(32, HEADS), scale=0.5).astype(np.float32)
    return result


def random_tensor(*shape: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Return uniform numbers."""
    return np.random.default_rng(1).uniform(low, high, size=shape).astype(np.float32)


def write_model(
    path: Path,
    arch: str = "llama",
    fields: Mapping[str, Any] | None = None,
    added: Mapping[str, np.ndarray] | None = None,
    *,
    without: Collection[str] = (),
) -> Path:
    """Write a file with random weights in float32.

    Args:
        path: the file.
        arch: its architecture.
        fields: fields of the architecture that are added or replaced; ``None`` removes one.
        added: tensors that are added or replaced.
        without: ends of names of tensors that are left out.
    """
    import gguf

    from midlayer_encoders.extras.export.llama_cpp import _add_tokenizer
    from tests.export.tiny_bpe import bpe_tokenizer

    defaults = {"vocab_size": VOCAB, "pooling_type": 1, **FIELDS[arch]}
    every_field = {name: value for name, value in {**defaults, **(fields or {})}.items() if value is not None}
    writer = gguf.GGUFWriter(path, arch)
    for name, value in every_field.items():
        key = f"{arch}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif name.endswith(_FLOATS):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    _add_tokenizer(writer, bpe_tokenizer(), VOCAB)
    if arch == "bert":
        writer.add_token_type_count(2)
    for name, values in {**tensors(arch, every_field), **(added or {})}.items():
        if not name.endswith(tuple(without)):
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
