"""What makes a plain folder readable by older releases: sentence-transformers from 3.0 on, transformers from 4.41 on.

Newer releases read the older keys as well as their own, so there is one folder for all of them. What older ones have no
key for (``norm="none"``, several layers, images and audio) stays as the installed release wrote it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

__all__ = ["ASKED_FOR", "POOLING_KEYS", "make_readable_by_older", "read_json", "write_json"]

ASKED_FOR = ("model.safetensors.index.json", "model.safetensors", "modules.json", "config.json")
"""What loaders ask for in a folder: without the last of these nobody loads it. The index is among them since vLLM reads
the shards that one of a model before names, instead of the weights beside it."""

# The first module of an encoder of text that hands on what its model returns: the one that older releases know.
_PLAIN = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""The key that was set to true for a pooling, before there was one key with its name."""
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")
_DENSE = ("in_features", "out_features", "bias", "activation_function")
# How transformers 4 called what 5 has in `rope_parameters`, where that was not `rope_theta`.
_BASES = {
    "gpt_neox": {"": "rotary_emb_base"},
    "modernbert": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
}
# Whose weights or blocks older releases of transformers take for others, without a word.
_OTHERS = ("clip_text_model", "gemma3", "gemma3_text", "idefics2", "imagegpt", "moshi")
_ABSOLUTE = ("camembert", "roberta", "xlm-roberta")  # the one kind that is left; vLLM 0.32 asks for its name
_SHARES = {"gpt_neox": "rotary_pct"}


def make_readable_by_older(folder: Path, max_length: int | None, *, always: bool = False) -> bool:
    """Rewrite the JSON of a folder of sentence-transformers with the keys of older releases, and return whether it was.

    Args:
        folder: as the installed release wrote it. One that older releases have no keys for is left as it is.
        max_length: number of tokens after which a text is truncated.
        always: even where older releases of transformers would make other vectors; for engines that read the older
            keys with models of their own.
    """
    modules = read_json(folder / "modules.json")
    names = [entry["type"].rpartition(".")[2] for entry in modules]
    first = folder / "sentence_bert_config.json"
    if not first.is_file() or read_json(first) != _PLAIN or names[:2] != ["Transformer", "Pooling"]:
        return False
    if not set(names) <= set(_KNOWN) or names.count("Pooling") > 1:
        return False
    if not always and _read_otherwise(folder, max_length):
        return False
    for entry, name in zip(modules, names, strict=True):
        entry["type"] = f"sentence_transformers.models.{name}"
        if name == "Pooling":
            _rewrite_pooling(folder / entry["path"] / "config.json")
        elif name == "Dense":
            _rewrite_dense(folder / entry["path"])
    write_json(first, {"max_seq_length": max_length, "do_lower_case": False})
    _rewrite_tokenizer(folder)
    _rewrite_model(folder / "config.json")
    write_json(folder / "modules.json", modules)
    return True


def _read_otherwise(folder: Path, max_length: int | None) -> bool:
    """Return whether older releases would load a folder, and make other vectors."""
    config = read_json(folder / "config.json")
    window = config.get("sliding_window")
    return (
        config.get("model_type") in _OTHERS
        or config.get("is_causal") is False  # a setting that transformers 4 does not read
        or bool(window and (max_length or window + 1) > window)  # which blocks have one, and how wide it is, differs
        or bool(read_json(folder / "config_sentence_transformers.json").get("truncate_dim"))  # not read before 6
    )


def read_json(path: Path) -> Any:
    """Return what a file of JSON holds."""
    return json.loads(path.read_text(encoding="utf8"))


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON that people may read."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf8")


def _rewrite_pooling(path: Path) -> None:
    """Name the pooling in both ways: by ``pooling_mode``, and by a key for each that is true or false."""
    config = read_json(path)
    mode = config["pooling_mode"]
    write_json(
        path,
        {
            "word_embedding_dimension": config["embedding_dimension"],
            "pooling_mode": mode,
            **{key: name == mode for name, key in POOLING_KEYS.items()},
            "include_prompt": config["include_prompt"],
        },
    )


def _rewrite_dense(folder: Path) -> None:
    """Leave out the keys that are new, and write the weights once more in the one format that 3.0 reads."""
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {name: config[name] for name in _DENSE})
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def _rewrite_tokenizer(folder: Path) -> None:
    """Name a class that transformers 4 has, which reads ``tokenizer.json`` as it is, and write merges as it reads them.

    Before tokenizers 0.20 a merge was one string, its two parts separated by a space.
    """
    settings, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    config = read_json(settings)
    if config.get("tokenizer_class") == "TokenizersBackend":
        write_json(settings, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    made = read_json(file) if file.is_file() else {}
    merges = made.get("model", {}).get("merges") or []
    if merges and all(isinstance(pair, list) and not any(" " in part for part in pair) for pair in merges):
        made["model"]["merges"] = [" ".join(pair) for pair in merges]
        write_json(file, made)


def _rewrite_model(path: Path) -> None:
    """Repeat under their older names the data type, and the rotary positions, for which others would be taken."""
    config = read_json(path)
    kind = config.get("model_type")
    if config.get("dtype") is not None:
        config.setdefault("torch_dtype", config["dtype"])
    if kind in _ABSOLUTE:
        config.setdefault("position_embedding_type", "absolute")
    rope = config.get("rope_parameters") or {}
    names = _BASES.get(kind, {"": "rope_theta"})
    for place, name in names.items():
        found = rope.get(place) if place else rope
        if isinstance(found, dict) and "rope_theta" in found:
            config.setdefault(name, found["rope_theta"])
    main = rope.get("full_attention", rope)
    if "partial_rotary_factor" in main:
        config.setdefault(_SHARES.get(kind, "partial_rotary_factor"), main["partial_rotary_factor"])
    scaling = {name: value for name, value in main.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if scaling.get("rope_type", "default") != "default":
        config.setdefault("rope_scaling", {**scaling, "type": scaling["rope_type"]})
    write_json(path, config)
