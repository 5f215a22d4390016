"""Export GGUF files for llama.cpp: cut an existing file, or write the weights and the tokenizer of an encoder."""

import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.extras.export import _comparison
from midlayer_encoders.extras.export._comparison import ENGINE_POOLINGS, Exported
from midlayer_encoders.extras.export._engines import engine_vectors
from midlayer_encoders.extras.gguf.tokenizer import SPLITS
from midlayer_encoders.files import write_folder

logger = logging.getLogger(__name__)

_FILE = "model.gguf"
_MIN_COSINE = 0.999  # llama.cpp multiplies 8-bit activations, the encoder float32
_MIN_COSINE_INT8 = 0.995  # SmolLM2-135M has 0.9997, and 0.974 with its next layer
_POOLING_NUMBERS = {name: number for number, name in enumerate(ENGINE_POOLINGS, start=1)}  # llama.cpp's enum
_CUT_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "bert")
# llama.cpp recognizes Gemma's 27B models by their depth and scales their attention differently.
_DEPTH_OF_27B = {"gemma2": 46, "gemma3": 62}
_BLOCK = re.compile(r"blk\.(\d+)\.")

#: llama.cpp's architecture for each model type.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_LLAMA_ROPE_TYPES = ("default", "linear", "llama3", "of a GGUF file")  # fixed frequencies, which the file stores

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


def export_gguf(encoder: LayerEncoder, folder: Path, *, int8: bool = False) -> Exported:
    """Cut the GGUF file that an encoder was read from, or write the encoder's weights, and add a card.

    If ``xllamacpp`` is installed, the vectors of sample texts are compared.

    Args:
        encoder: an encoder read from a GGUF file, or of a Llama-type model.
        folder: output folder.
        int8: write weights in 8 bits instead of 16; not for an encoder that was read from a GGUF file.
    """
    source = getattr(encoder.location.read_weights, "path", None)  # of the file that it was read from
    if int8 and source is not None:
        raise OptionError("`int8` does not apply to an encoder read from a GGUF file, whose weights do not change.")
    if (obstacle := _obstacle(encoder, from_file=source is not None)) is not None:
        raise CutError(f"llama.cpp cannot run this encoder of {encoder.name}: {obstacle}.")
    min_cosine: float | None = None

    def write(staging: Path) -> None:
        nonlocal min_cosine
        staging.mkdir()
        path = staging / _FILE
        if source is None:
            write_gguf(encoder, path, pooling=_POOLING_NUMBERS[encoder.pooling], int8=int8)
        else:
            cut_gguf(source, path, encoder.layer, pooling=encoder.pooling)
        min_cosine = _compare(encoder, path, _MIN_COSINE_INT8 if int8 else _MIN_COSINE)
        packages = _comparison.versions("gguf", *(["xllamacpp"] if _has_llama() else []))
        _comparison.write_card(staging, encoder, "gguf", file=_FILE, cosine=min_cosine, versions=packages)

    files = write_folder(folder, write, last=(_comparison.CARD,))
    if min_cosine is None:
        return Exported("gguf", folder, files=files)
    engine = f"llama.cpp through xllamacpp {_comparison.versions('xllamacpp')['xllamacpp']}"
    return Exported("gguf", folder, engine, 1 - min_cosine, files=files)


def _has_llama() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def _obstacle(encoder: LayerEncoder, *, from_file: bool) -> str | None:
    """Return why llama.cpp would produce other vectors, or None."""
    options = encoder.options
    if encoder.norm == "none":
        return "it always applies the final norm: pass norm='final'"
    if (obstacle := _comparison.common_obstacle(encoder)) is not None:
        return obstacle
    if options.template is not None or options.chat_template:
        return "the tokenizer contains a template, which GGUF cannot store: leave it out, and add it to texts yourself"
    if not encoder.counting.all:
        return "it pools all tokens: leave out `skip_first`, `skip_special` and `template_tokens`"
    if not set(encoder.after_pooling) <= {"Normalize"}:
        return "it has no modules after the pooling: leave out `center`"
    if from_file and (options.bidirectional or options.adapters):
        name = "bidirectional" if options.bidirectional else "adapters"
        return f"the file holds the model without `{name}`: leave it out"
    if from_file and "generated_from_trainer" in encoder.model_card_data.tags:
        return "the encoder was trained after loading, but the file was not: save it, and export that folder"
    return None


def cut_gguf(source: Path, path: Path, layer: int, *, pooling: str) -> None:
    """Write a GGUF file with the first blocks of another; the remaining weights are unchanged.

    Args:
        source: a GGUF file in one part.
        path: output file.
        layer: number of blocks, at least one.
        pooling: ``"mean"``, ``"cls"`` or ``"last"``.

    Raises:
        CutError: if a cut file of this architecture would run differently.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    arch = _value(reader, "general.architecture")
    depth = int(_value(reader, f"{arch}.block_count") or 0)
    _verify_file(reader, source, arch, depth)
    replaced = {f"{arch}.block_count": layer, f"{arch}.pooling_type": _POOLING_NUMBERS[pooling]}
    with gguf_writer(path, arch, endianess=reader.endianess) as writer:
        if (alignment := _value(reader, "general.alignment")) is not None:
            writer.add_custom_alignment(int(alignment))
        for name, number in replaced.items():
            writer.add_uint32(name, number)
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.alignment", *replaced):
                continue
            value = field.contents()
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            if is_array and name.startswith(f"{arch}.") and len(value) == depth:
                value = value[:layer]  # one value per block
            writer.add_key_value(name, value, field.types[0], sub_type=field.types[-1] if is_array else None)
        for tensor in reader.tensors:
            block = _BLOCK.match(tensor.name)
            if block is None or int(block[1]) < layer:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)


def _value(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _verify_file(reader: Any, source: Path, arch: str, depth: int) -> None:
    """Verify that a file runs the same after a cut."""
    reason = None
    if arch not in _CUT_ARCHITECTURES:
        reason = f"has the architecture {arch!r}. Supported architectures are {', '.join(_CUT_ARCHITECTURES)}"
    elif depth == _DEPTH_OF_27B.get(arch):
        reason = f"has {depth} blocks, by which llama.cpp recognizes the 27B model of {arch} and scales its attention"
    elif (_value(reader, "split.count") or 1) > 1:
        reason = "is one of several parts. Merge them first: llama-gguf-split --merge"
    if reason is not None:
        raise CutError(f"{source.name} cannot be cut: it {reason}.")


def _compare(encoder: LayerEncoder, path: Path, min_cosine: float) -> float | None:
    """Return the smallest cosine of llama.cpp's vectors with the encoder's, or None if llama.cpp is not installed."""
    if not _has_llama():
        logger.warning("The file was not run: llama.cpp is not installed (pip install 'midlayer-encoders[gguf]').")
        return None
    samples = _comparison.sample_inputs(encoder, "text")
    max_length = encoder.max_seq_length or 512  # llama.cpp rejects longer texts instead of truncating them
    token_ids = encoder.tokenizer([encoder.default_prompt + text for text in samples], verbose=False)["input_ids"]
    texts = [text for text, ids in zip(samples, token_ids, strict=True) if len(ids) <= max_length] or samples[:1]
    try:
        vectors = np.array(engine_vectors("llama", path, [encoder.default_prompt + text for text in texts]))
    except RuntimeError as reason:
        raise CutError(f"llama.cpp does not read the exported file ({reason}). Nothing was written.") from reason
    lowest = _comparison.cosine(encoder.encode(texts, show_progress_bar=False), vectors)
    if lowest < min_cosine:
        raise CutError(
            f"llama.cpp computes other vectors than the encoder (cosine {lowest:.4f}, below {min_cosine}), perhaps "
            "because it tokenizes differently. Nothing was written; use target='sentence-transformers'."
        )
    return lowest


# --- an encoder's weights and tokenizer -------------------------------------------------------------------------------


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
    if "short_factor" in rope and rope["short_factor"] == rope.get("long_factor") and rope.get("attention_factor") == 1:
        rope_type = "of a GGUF file"
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
    if getattr(config, "is_causal", None) is False:
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
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


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
