"""What text-embeddings-inference reads in a folder, and where it would stop, or drop something.

Read in its source, release 1.9.3, main at commit 0d124dc: ``router/src/lib.rs``, ``core/src/tokenization.rs``,
``backends/src/lib.rs`` and ``backends/candle/src``. It is written in Rust and is not on PyPI, so it is not run here;
its tokenizer is the library ``tokenizers``, which is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import safe_open

from midlayer_encoders.encoder.older_versions import POOLING_KEYS, read_json
from midlayer_encoders.errors import CutError

__all__ = ["CUDA_ONLY", "TEI_SOURCE", "read_as_tei", "tei_tokens"]

TEI_SOURCE = "text-embeddings-inference 1.9.3, main at 0d124dc"
CUDA_ONLY = ("llama", "mistral", "qwen2")
"""Model types that it runs on NVIDIA GPUs in float16 alone."""

_COUNTS = "vocab_size num_hidden_layers num_attention_heads max_position_embeddings hidden_size intermediate_size"
_BERT = f"{_COUNTS} hidden_act hidden_dropout_prob type_vocab_size initializer_range layer_norm_eps pad_token_id"
_LLAMA = f"{_COUNTS} num_key_value_heads hidden_act rms_norm_eps rope_theta"
# The settings without which it does not start.
_SETTINGS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT),
    "distilbert": "vocab_size dim n_layers n_heads hidden_dim activation max_position_embeddings pad_token_id",
    "mpnet": f"{_COUNTS} hidden_act hidden_dropout_prob attention_probs_dropout_prob initializer_range layer_norm_eps "
    "relative_attention_num_buckets",
    "modernbert": f"{_COUNTS} hidden_activation initializer_range initializer_cutoff_factor norm_eps norm_bias "
    "pad_token_id eos_token_id bos_token_id cls_token_id sep_token_id global_rope_theta local_rope_theta "
    "attention_bias attention_dropout global_attn_every_n_layers local_attention classifier_activation",
    "qwen3": f"{_LLAMA} attention_bias use_sliding_window eos_token_id",
    "gemma3_text": f"{_COUNTS} num_key_value_heads hidden_activation rms_norm_eps rope_theta attention_bias "
    "pad_token_id query_pre_attn_scalar rope_local_base_freq _sliding_window_pattern use_bidirectional_attention",
    "qwen2": f"{_LLAMA} use_sliding_window",
    **dict.fromkeys(("llama", "mistral"), f"{_LLAMA} initializer_range"),
}
_LAST = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")  # that have the last token for a pooling
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swiglu", "tanh")
_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_W, _WB = r"\.weight", r"\.(weight|bias)"
_BLOCK = rf"layers\.\d+\.((input|post_attention)_layernorm|mlp\.(gate|up|down)_proj|self_attn\.[qkvo]_proj){_W}"
_AROUND = rf"(embed_tokens|norm){_W}"
_BERT_NAMES = (
    rf"embeddings\.((word|position|token_type)_embeddings{_W}|LayerNorm{_WB}|position_ids)|pooler\..*|"
    rf"encoder\.layer\.\d+\.(attention\.(self\.(query|key|value)|output\.(dense|LayerNorm))|intermediate\.dense|"
    rf"output\.(dense|LayerNorm)){_WB}"
)
# The names of all weights that it reads: another in the file would be left out without a word.
_NAMES = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT_NAMES),
    "distilbert": rf"embeddings\.((word|position)_embeddings{_W}|LayerNorm{_WB})|transformer\.layer\.\d+\."
    rf"(attention\.(q|k|v|out)_lin|ffn\.lin[12]|(sa|output)_layer_norm){_WB}",
    "mpnet": rf"embeddings\.((word|position)_embeddings{_W}|LayerNorm{_WB}|position_ids)|pooler\..*|"
    rf"encoder\.relative_attention_bias{_W}|encoder\.layer\.\d+\."
    rf"(attention\.(attn\.[qkvo]|LayerNorm)|intermediate\.dense|output\.(dense|LayerNorm)){_WB}",
    "modernbert": rf"(embeddings\.(tok_embeddings|norm)|final_norm){_W}|layers\.\d+\."
    rf"((attn|mlp)_norm{_W}|attn\.(Wqkv|Wo){_WB}|mlp\.(Wi|Wo){_WB})",
    "qwen3": rf"{_AROUND}|{_BLOCK}|layers\.\d+\.self_attn\.([qk]_norm{_W}|[qkvo]_proj\.bias)",
    "gemma3_text": rf"{_AROUND}|{_BLOCK}|layers\.\d+\.(self_attn\.([qk]_norm{_W}|[qkvo]_proj\.bias)|"
    rf"(pre|post)_feedforward_layernorm{_W})",
    "qwen2": rf"{_AROUND}|{_BLOCK}|layers\.\d+\.self_attn\.[qkv]_proj\.bias",
    **dict.fromkeys(("llama", "mistral"), rf"{_AROUND}|{_BLOCK}"),
}


def read_as_tei(folder: Path) -> dict[str, Any]:
    """Return what it takes from a folder, or raise where it would not start or make other vectors.

    Raises:
        CutError: naming the file and the setting.
    """
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in _SETTINGS:
        raise _stops(f"has no model of the type {kind!r}; it has {', '.join(_SETTINGS)}")
    _check_config(config, kind)
    _check_weights(folder, kind)
    types = [(entry["type"].removeprefix("sentence_transformers.models."), entry["path"]) for entry in _modules(folder)]
    if odd := [name for name, _ in types if name not in _MODULES]:
        raise _stops(f"does not read modules.json with the module {odd[0]}, and would leave out every Dense")
    pooling = read_json(folder / "1_Pooling" / "config.json")
    keys = {"cls": POOLING_KEYS["cls"], "mean": POOLING_KEYS["mean"], "last": POOLING_KEYS["lasttoken"]}
    mode = next((name for name, key in keys.items() if pooling[key]), None)
    if mode is None or (mode == "last" and kind not in _LAST):
        raise _stops(f"has no such pooling for the type {kind}: pass pooling='mean' or 'cls'")
    for path in (path for name, path in types if name == "Dense"):
        if read_json(folder / path / "config.json")["activation_function"] != "torch.nn.modules.linear.Identity":
            raise _stops(f"has no such activation as that of {path}")
    return {
        "pooling": mode,
        "max_length": int(read_json(folder / "sentence_bert_config.json")["max_seq_length"]),
        "dense": sum(name == "Dense" for name, _ in types),
    }


def tei_tokens(folder: Path, texts: list[str], max_length: int) -> list[list[int]]:
    """Return the tokens that it makes of texts: those of ``tokenizer.json`` alone, truncated on the right."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length, strategy="longest_first", direction="right")
    return [one.ids for one in tokenizer.encode_batch(texts)]


def _modules(folder: Path) -> list[dict[str, str]]:
    modules: list[dict[str, str]] = read_json(folder / "modules.json")
    return modules


def _stops(why: str) -> CutError:
    return CutError(f"This encoder cannot be served by text-embeddings-inference: it {why}.")


def _check_config(config: dict[str, Any], kind: str) -> None:
    if config.get("use_sliding_window"):
        raise _stops("has no sliding windows for this type")
    heads = config.get("num_attention_heads")
    if kind in CUDA_ONLY and config.get("head_dim") and heads and config["head_dim"] * heads != config["hidden_size"]:
        raise _stops("has the width of a head be hidden_size / num_attention_heads for this type")
    missing = [name for name in _SETTINGS[kind].split() if config.get(name) is None]
    if missing:
        raise _stops(f"needs {', '.join(missing)} in config.json")
    for name in ("hidden_act", "hidden_activation", "activation"):
        if name in _SETTINGS[kind].split() and config[name] not in _ACTIVATIONS:
            raise _stops(f"has no activation {config[name]!r}")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise _stops("has absolute positions alone for this type")
    if config.get("rope_scaling"):
        raise _stops("does not scale rotary positions as this model does")
    kinds = config.get("layer_types") or []
    every = config.get("global_attn_every_n_layers" if kind == "modernbert" else "_sliding_window_pattern")
    first = 0 if kind == "modernbert" else (every or 0) - 1
    if every and any((one == "full_attention") != (n % every == first) for n, one in enumerate(kinds)):
        raise _stops("counts which blocks have a sliding window in another way")


def _check_weights(folder: Path, kind: str) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = list(read_json(index)["weight_map"])
    else:
        with safe_open(folder / "model.safetensors", "pt") as file:
            names = list(file.keys())
    if odd := [name for name in names if not re.fullmatch(_NAMES[kind], name)]:
        raise _stops(f"does not read the weights {odd[0]}")
