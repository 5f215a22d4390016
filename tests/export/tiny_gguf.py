"""Write small GGUF files of the architectures that can be cut."""

from pathlib import Path
from typing import Any

import numpy as np

DEPTH = 4


def save_gguf(path: Path, arch: str, *, depth: int = DEPTH, parts: int = 1, alignment: int | None = None) -> Path:
    """Write a file whose blocks hold 8-bit quantized weights and norms in float32, with values for each block."""
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(depth)
    writer.add_embedding_length(64)
    writer.add_uint32(f"{arch}.pooling_type", 2)
    writer.add_array(f"{arch}.attention.head_count_kv", list(range(1, depth + 1)))
    writer.add_array(f"{arch}.rope.dimension_sections", [1, 2, 3])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü", "d"][:DEPTH])
    if parts > 1:
        writer.add_uint16("split.count", parts)
    kinds = gguf.MODEL_TENSORS[{name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[arch]]
    names = [gguf.TENSOR_NAMES[kind] for kind in kinds]  # all that such a file may hold, inside of blocks and outside
    for name in dict.fromkeys(name.format(bid=block) for block in range(depth) for name in names):
        values = rng.normal(size=(64,) if "norm" in name else (8, 64)).astype(np.float32)
        if "norm" in name:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_whole(home: str, path: Path, arch: str) -> Path:
    """Write a tiny Gemma or BERT with a byte-level BPE tokenizer as a file that llama.cpp runs, in float32."""
    import gguf
    from transformers import AutoModel, AutoTokenizer

    from midlayer_encoders.extras.export.llama_cpp import _add_tokenizer

    model: Any = AutoModel.from_pretrained(home)
    config, depth = model.config, model.config.num_hidden_layers
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(depth)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    _add_tokenizer(writer, AutoTokenizer.from_pretrained(home), config.vocab_size)
    if arch == "bert":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_causal_attention(False)
        writer.add_token_type_count(config.type_vocab_size)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        rope = config.rope_parameters
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), depth)
    for name, weight in model.state_dict().items():
        result = names.get_name(name if arch == "bert" else f"model.{name}", try_suffixes=(".weight", ".bias"))
        if result is None:
            assert name.startswith("pooler."), name
            continue
        values = weight.float().numpy()
        writer.add_tensor(result, values + 1 if arch != "bert" and values.ndim == 1 else values)  # Gemma's norms: 1 + w
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
