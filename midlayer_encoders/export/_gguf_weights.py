"""A GGUF file of the weights that an encoder has, for models of Llama's kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from midlayer_encoders.errors import CutError
from midlayer_encoders.export._gguf_tokenizer import add_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["write_gguf"]

# llama.cpp's architecture of a model type, and whether it rotates neighboring dimensions where transformers rotates the
# two halves of a head: their queries and keys change places then.
_KNOWN = {"llama": ("llama", True), "mistral": ("llama", True), "qwen2": ("qwen2", False), "qwen3": ("qwen3", False)}
_ROPES = ("default", "linear", "llama3")  # fixed frequencies, and nothing else


def write_gguf(encoder: LayerEncoder, path: Path, *, pooling: int, int8: bool) -> None:
    """Write an encoder's weights: matrices in 16 bits, or in 8 with a scale for 32 of a row, norms in 32.

    Args:
        encoder: of a model like Llama with a byte-level BPE tokenizer.
        path: where to write.
        pooling: llama.cpp's number for it.
        int8: whether to write Q8_0 instead of F16.

    Raises:
        CutError: a model or a tokenizer that llama.cpp would read otherwise.
    """
    import gguf

    model: Any = encoder.transformer
    config = model.config
    arch, swapped = _checked(config)
    weights = dict(model.state_dict())
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), encoder.layer)
    writer = gguf.GGUFWriter(path, arch)
    try:
        _add_sizes(writer, encoder, config, pooling)
        add_tokenizer(writer, encoder.tokenizer, len(weights["embed_tokens.weight"]))
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if int8 else gguf.LlamaFileType.MOSTLY_F16)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if (factors := _rope_factors(model)) is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        for name, weight in weights.items():
            found = names.get_name(f"model.{name}", try_suffixes=(".weight", ".bias"))
            if found is None:
                raise _refusal(config, f"llama.cpp has no place for {name}")
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            values = weight.detach().float().cpu().numpy()
            part = name.split(".")[-2]
            _add(writer, found, _neighbors(values, heads[part]) if swapped and part in heads else values, int8)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _refusal(config: Any, why: str) -> CutError:
    return CutError(
        f"A model of type {config.model_type!r} cannot be written as GGUF here: {why}. Write "
        "target='sentence-transformers', and run llama.cpp's convert_hf_to_gguf.py on that folder."
    )


def _checked(config: Any) -> tuple[str, bool]:
    """Return what llama.cpp calls a model, and whether it rotates neighbors; raise where it would run otherwise."""
    if config.model_type not in _KNOWN:
        raise _refusal(
            config, f"it can be for {', '.join(_KNOWN)}; or read the encoder from a GGUF file (gguf_file='…')"
        )
    arch, swapped = _KNOWN[config.model_type]
    rope = getattr(config, "rope_parameters", None) or {}
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kind not in (_ROPES if swapped else _ROPES[:1]) or part != 1.0:
        raise _refusal(config, f"its rotary embedding is {kind!r}, of {part:.0%} of a head")
    if kinds - {"full_attention"} or (config.model_type == "mistral" and config.sliding_window is not None):
        raise _refusal(config, "some of its layers have a sliding window")
    if config.hidden_act != "silu":
        raise _refusal(config, f"its activation is {config.hidden_act!r}, and llama.cpp's is 'silu'")
    return arch, swapped


def _add_sizes(writer: Any, encoder: LayerEncoder, config: Any, pooling: int) -> None:
    import gguf

    writer.add_name(encoder.name)
    writer.add_block_count(encoder.layer)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_vocab_size(config.vocab_size)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(size)
    if encoder.options.bidirectional:
        writer.add_causal_attention(False)


def _rope_factors(model: Any) -> NDArray[np.float32] | None:
    """Return by what the frequencies of the rotary embedding are divided, ``None`` for those of its base alone."""
    used: torch.Tensor = model.rotary_emb.inv_freq.double().cpu()
    plain = model.config.rope_parameters["rope_theta"] ** -(torch.arange(len(used), dtype=torch.float64) / len(used))
    factors = plain / used
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5) else factors.float().numpy()


def _neighbors(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return rows of queries or keys with those side by side that are rotated together.

    Example:
        >>> _neighbors(np.arange(8.0), heads=2).tolist()
        [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add(writer: Any, name: str, values: NDArray[Any], int8: bool) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType
    if values.ndim == 1:  # norms and biases, which llama.cpp adds in float32
        writer.add_tensor(name, values)
    elif int8 and values.shape[-1] % 32 == 0:
        writer.add_tensor(name, gguf.quants.quantize(values, kind.Q8_0), raw_dtype=kind.Q8_0)
    else:
        if np.abs(values).max() > np.finfo(np.float16).max:
            raise CutError(
                f"{name} holds values that float16 does not: pass int8=True (Q8_0 scales 32 of them together)."
            )
        writer.add_tensor(name, values.astype(np.float16), raw_dtype=kind.F16)
