"""Write the weights and the tokenizer of a Llama-type encoder as a GGUF file."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import CutError
from midlayer_encoders.models.gguf_tokenizer import SPLITS

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's architecture for each model type."""
_LLAMA_ROPE_TYPES = ("default", "linear", "llama3")  # fixed frequencies, which the file stores

# llama.cpp hard-codes how each named pre-tokenizer splits texts.
# https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    ("GPT-2 pattern",): "gpt-2",
    ("single digits", "GPT-2 pattern"): "smollm",
    (LLAMA_3_PATTERN, "bytes"): "llama-bpe",
    (LLAMA_3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"), "bytes"): "qwen2",
} | {(*splits.patterns, "bytes"): splits.names.split()[0] for splits in reversed(SPLITS)}  # read from a GGUF file
_CURE = "Export target='sentence-transformers' and run llama.cpp's convert_hf_to_gguf.py on that folder."


def write_gguf(encoder: LayerEncoder, path: Path, *, pooling: int, int8: bool) -> None:
    """Write an encoder as GGUF: matrices in F16 or Q8_0, vectors in F32.

    Args:
        encoder: an encoder of a Llama-type model with a byte-level BPE tokenizer.
        path: output file.
        pooling: llama.cpp's pooling number.
        int8: write Q8_0 instead of F16.

    Raises:
        CutError: if llama.cpp would run the model or read its tokenizer differently.
    """
    import gguf

    model: Any = encoder.transformer
    config = model.config
    arch = _architecture(config)
    weights = dict(model.state_dict())
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), encoder.layer)
    # llama.cpp's Llama rotates neighboring dimensions; transformers rotates the two halves of a head.
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if arch == "llama" else {}
    with gguf_writer(path, arch) as writer:
        _add_hyperparameters(writer, encoder, pooling)
        _add_tokenizer(writer, encoder.tokenizer, len(weights["embed_tokens.weight"]))
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if int8 else gguf.LlamaFileType.MOSTLY_F16)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if (factors := _rope_factors(model)) is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        for name, weight in weights.items():
            gguf_name = names.get_name(f"model.{name}", try_suffixes=(".weight", ".bias"))
            if gguf_name is None:
                raise _model_refusal(config, f"llama.cpp has no tensor for {name}")
            values = weight.detach().float().cpu().numpy()
            projection = name.split(".")[-2]
            if projection in heads:
                values = _interleave_halves(values, heads[projection])
            _add_tensor(writer, gguf_name, values, int8)


@contextmanager
def gguf_writer(path: Path, arch: str, **options: Any) -> Iterator[Any]:
    """Yield a writer to add metadata and tensors to, and write the file afterwards."""
    import gguf

    writer = gguf.GGUFWriter(path, arch, **options)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _model_refusal(config: Any, reason: str) -> CutError:
    return CutError(f"A model of type {config.model_type!r} cannot be exported as GGUF: {reason}. {_CURE}")


def _architecture(config: Any) -> str:
    """Return llama.cpp's architecture, or raise if it would run the model differently."""
    if config.model_type not in _ARCHITECTURES:
        types = ", ".join(_ARCHITECTURES)
        raise _model_refusal(config, f"supported types are {types}, and encoders read from a GGUF file (gguf_file='…')")
    arch = _ARCHITECTURES[config.model_type]
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    rotated = rope.get("partial_rotary_factor", 1.0)
    attention_types = set(getattr(config, "layer_types", None) or ())
    if rope_type not in (_LLAMA_ROPE_TYPES if arch == "llama" else ("default",)) or rotated != 1.0:
        raise _model_refusal(config, f"its rotary embedding is {rope_type!r} over {rotated:.0%} of a head")
    if attention_types - {"full_attention"} or (config.model_type == "mistral" and config.sliding_window is not None):
        raise _model_refusal(config, "it has layers with a sliding window")
    if config.hidden_act != "silu":
        raise _model_refusal(config, f"its activation is {config.hidden_act!r}, but llama.cpp uses 'silu'")
    return arch


def _add_hyperparameters(writer: Any, encoder: LayerEncoder, pooling: int) -> None:
    import gguf

    config: Any = encoder.transformer.config
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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(head_dim)
    if encoder.options.bidirectional:
        writer.add_causal_attention(False)


def _rope_factors(model: Any) -> NDArray[np.float32] | None:
    """Return the divisors of the rotary frequencies, or None if they are all one."""
    frequencies: torch.Tensor = model.rotary_emb.inv_freq.double().cpu()
    exponents = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    factors = model.config.rope_parameters["rope_theta"] ** -exponents / frequencies
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-5) else factors.float().numpy()


def _interleave_halves(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Return the rows of queries or keys with each rotated pair adjacent.

    Example:
        >>> _interleave_halves(np.arange(8.0), heads=2).tolist()
        [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_tensor(writer: Any, name: str, values: NDArray[Any], int8: bool) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType
    if values.ndim == 1:  # norms and biases, which llama.cpp applies in float32
        writer.add_tensor(name, values)
    elif int8 and values.shape[-1] % 32 == 0:
        writer.add_tensor(name, gguf.quants.quantize(values, kind.Q8_0), raw_dtype=kind.Q8_0)
    elif np.abs(values).max() > np.finfo(np.float16).max:
        raise CutError(f"{name} overflows float16: pass int8=True (Q8_0 stores one scale for 32 values).")
    else:
        writer.add_tensor(name, values.astype(np.float16), raw_dtype=kind.F16)


def _add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    """Add a tokenizer, with placeholders for unused ids, or raise if llama.cpp would tokenize differently."""
    from gguf import TokenType

    if not getattr(tokenizer, "is_fast", False):
        raise _tokenizer_refusal(f"{type(tokenizer).__name__} is not a fast tokenizer")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    pre_tokenizer = _pre_tokenizer_name(state)
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    types = dict.fromkeys(vocabulary, TokenType.NORMAL)
    for token in state["added_tokens"]:
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    add_bos, add_eos = _added_special_tokens(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([vocabulary.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types([types.get(number, TokenType.UNUSED) for number in range(vocab_size)])
    writer.add_token_merges([" ".join([pair] if isinstance(pair, str) else pair) for pair in state["model"]["merges"]])
    writer.add_add_bos_token(add_bos)
    writer.add_add_eos_token(add_eos)
    for kind in ("bos", "eos", "pad", "unk"):
        if (number := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)


def _tokenizer_refusal(reason: str) -> CutError:
    return CutError(f"The tokenizer cannot be exported as GGUF: {reason}. {_CURE}")


def _pre_tokenizer_name(state: dict[str, Any]) -> str:
    """Return llama.cpp's name of a pre-tokenizer."""
    model = state["model"]
    normalizer = state["normalizer"]
    pre_tokenizer = state["pre_tokenizer"]
    if model.get("byte_fallback"):
        raise _tokenizer_refusal("it is SentencePiece BPE, whose scores tokenizer.json does not hold")
    if model["type"] != "BPE" or pre_tokenizer is None:
        raise _tokenizer_refusal(f"it is {model['type']}")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _tokenizer_refusal(f"it normalizes texts ({normalizer['type']})")
    steps = tuple(
        _pre_tokenizer_step(step)
        for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer])
        if not _removes_unknown_bytes(step, model["vocab"])
    )
    if steps not in _PRE_TOKENIZERS:
        raise _tokenizer_refusal(f"it splits texts by {' and '.join(steps)}, unlike GPT-2, SmolLM, Llama 3 and Qwen 2")
    return _PRE_TOKENIZERS[steps]


def _removes_unknown_bytes(step: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Return whether a step only drops bytes without a token, as llama.cpp does."""
    if step["type"] != "Split" or step["behavior"] != "Removed" or "Regex" not in step["pattern"]:
        return False
    pattern = re.compile(step["pattern"]["Regex"])
    return not any(map(pattern.search, vocabulary))


def _pre_tokenizer_step(step: dict[str, Any]) -> str:
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return "GPT-2 pattern" if step.get("use_regex", True) else "bytes"
    if step["type"] == "Digits" and step["individual_digits"]:
        return "single digits"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
        return str(step["pattern"]["Regex"])
    return json.dumps(step)


def _added_special_tokens(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether the tokenizer adds a BOS and an EOS token to a text."""
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    bos = [tokenizer.bos_token_id]
    eos = [tokenizer.eos_token_id]
    adds_bos = full[:1] == bos
    adds_eos = full[-1:] == eos
    if full != adds_bos * bos + plain + adds_eos * eos:
        raise _tokenizer_refusal("it adds more than one BOS and one EOS token to a text")
    return adds_bos, adds_eos
