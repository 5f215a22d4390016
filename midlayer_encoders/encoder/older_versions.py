"""Make a plain folder readable by older releases: sentence-transformers from 3.0 and transformers from 4.41.

Newer releases also read the older keys. Features without older keys (``norm="none"``, several layers, images and audio)
remain as the installed release wrote them.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from midlayer_encoders.files import read_json, write_json

LOADER_FILES = ("model.safetensors.index.json", "model.safetensors", "modules.json", "config.json")
"""Files that loaders require, which are written last. vLLM would read the shards that a previous index lists."""

# The config of the only first module that older releases support: a text model and its last hidden state.
_TEXT_MODULE = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
_POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""The key that older releases set to true for each pooling."""
_DENSE_KEYS = ("in_features", "out_features", "bias", "activation_function")
# Names in transformers 4 of the entries of `rope_parameters`, unless they are `rope_theta`.
_ROPE_NAMES = {
    "gpt_neox": {"": "rotary_emb_base"},
    "modernbert": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
}
# Model types that older releases of transformers silently load differently.
_LOADED_DIFFERENTLY = ("clip_text_model", "gemma3", "gemma3_text", "idefics2", "imagegpt", "moshi")
_ABSOLUTE_POSITIONS = ("camembert", "roberta", "xlm-roberta")  # vLLM 0.32 requires the name of the position embeddings
_ROTARY_SHARES = {"gpt_neox": "rotary_pct"}


def make_readable_by_older(folder: Path, max_length: int | None, *, always: bool = False) -> bool:
    """Add the keys of older releases to the JSON files of a folder, and return whether that was possible.

    Args:
        folder: folder that the installed release wrote.
        max_length: number of tokens after which a text is truncated.
        always: rewrite even if older releases of transformers would compute other vectors, for engines that read the
            older keys with different models.
    """
    modules = read_json(folder / "modules.json")
    names = [entry["type"].rpartition(".")[2] for entry in modules]
    first = folder / "sentence_bert_config.json"
    is_text_model = first.is_file() and read_json(first) == _TEXT_MODULE and names[:2] == ["Transformer", "Pooling"]
    if not is_text_model or not set(names[2:]) <= {"Transformer", "Dense", "Normalize"}:
        return False
    if not always and _is_loaded_differently(folder, max_length):
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


def _is_loaded_differently(folder: Path, max_length: int | None) -> bool:
    """Return whether older releases would compute other vectors from a folder."""
    config = read_json(folder / "config.json")
    window = config.get("sliding_window")
    return (
        config.get("model_type") in _LOADED_DIFFERENTLY
        or config.get("is_causal") is False  # which transformers 4 ignores
        or bool(window and (max_length or window + 1) > window)  # blocks and widths of the window differ
        or bool(read_json(folder / "config_sentence_transformers.json").get("truncate_dim"))  # ignored before 6
    )


def _rewrite_pooling(path: Path) -> None:
    """Add a boolean key for each pooling to ``pooling_mode``."""
    config = read_json(path)
    mode = config["pooling_mode"]
    legacy = {key: name in ([mode] if isinstance(mode, str) else mode) for name, key in _POOLING_KEYS.items()}
    current = {"word_embedding_dimension": config["embedding_dimension"], "pooling_mode": mode}
    write_json(path, {**current, **legacy, "include_prompt": config["include_prompt"]})


def _rewrite_dense(folder: Path) -> None:
    """Remove new keys, and also write the weights in the only format that 3.0 reads."""
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {name: config[name] for name in _DENSE_KEYS})
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def _rewrite_tokenizer(folder: Path) -> None:
    """Name a tokenizer class of transformers 4, and write merges as strings for tokenizers before 0.20."""
    settings, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    config = read_json(settings)
    if config.get("tokenizer_class") == "TokenizersBackend":
        write_json(settings, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer = read_json(file) if file.is_file() else {}
    merges = tokenizer.get("model", {}).get("merges") or []
    if merges and all(isinstance(pair, list) and not any(" " in part for part in pair) for pair in merges):
        tokenizer["model"]["merges"] = [" ".join(pair) for pair in merges]
        write_json(file, tokenizer)


def _rewrite_model(path: Path) -> None:
    """Repeat the dtype and the rotary settings under their older names."""
    config = read_json(path)
    model_type = config.get("model_type")
    if config.get("dtype") is not None:
        config.setdefault("torch_dtype", config["dtype"])
    if model_type in _ABSOLUTE_POSITIONS:
        config.setdefault("position_embedding_type", "absolute")
    rope = config.get("rope_parameters") or {}
    for attention, name in _ROPE_NAMES.get(model_type, {"": "rope_theta"}).items():
        settings = rope.get(attention) if attention else rope
        if isinstance(settings, dict) and "rope_theta" in settings:
            config.setdefault(name, settings["rope_theta"])
    main = rope.get("full_attention", rope)
    if "partial_rotary_factor" in main:
        config.setdefault(_ROTARY_SHARES.get(model_type, "partial_rotary_factor"), main["partial_rotary_factor"])
    scaling = {name: value for name, value in main.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if scaling.get("rope_type", "default") != "default":
        config.setdefault("rope_scaling", {**scaling, "type": scaling["rope_type"]})
    write_json(path, config)
