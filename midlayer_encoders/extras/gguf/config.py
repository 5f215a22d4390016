"""Translate the fields of a GGUF file into a transformers config, or refuse the file by the name of a field.

The rules and defaults follow llama.cpp: https://github.com/ggml-org/llama.cpp/tree/master/src/models
"""

import inspect
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midlayer_encoders.errors import CutError, error_summary
from midlayer_encoders.extras.gguf.file import GgufFile

_TABLES = tomllib.loads(Path(__file__).with_name("architectures.toml").read_text(encoding="utf8"))
ARCHITECTURES: dict[str, dict[str, Any]] = _TABLES["architectures"]
_MAX_BLOCKS = 4096
_POOLINGS: dict[Any, str | None] = {None: None, 0: None, 1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}
_TYPES = {name: kind for kind, names in _TABLES["types"].items() for name in names}
_CLASSES: dict[str, set[type]] = {"text": {str}, "flag": {bool}, "number": {int, float}}
_WINDOW_PATTERN = "attention.sliding_window_pattern"  # a list of flags is not a period
_SPECIAL_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def unreadable(reason: str) -> CutError:
    """Return the error of a file that would give other vectors here than in llama.cpp."""
    return CutError(f"The GGUF file {reason}. Pass the folder of the original model instead.")


def architecture(file: GgufFile) -> str:
    """Return the architecture of the model in a file, or raise if it is not supported."""
    arch = str(file.fields.get("general.architecture"))
    if arch not in ARCHITECTURES:
        raise unreadable(f"has the architecture {arch!r}; supported architectures are {', '.join(ARCHITECTURES)}")
    return arch


def pooling_name(file: GgufFile) -> str | None:
    """Return sentence-transformers' name of a file's pooling, ``rank`` for a reranker; ``None`` if it names none."""
    name = f"{architecture(file)}.pooling_type"
    if (number := file.fields.get(name)) not in [*_POOLINGS]:
        raise unreadable(f"has `{name}` = {number!r}, which is not the mean, the first or the last token")
    return _POOLINGS[number]


def read_config(file: GgufFile) -> Any:
    """Return the config of the model in a GGUF file.

    Raises:
        CutError: if the file has a field that the config cannot express, or lacks one that llama.cpp requires.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    arch = architecture(file)
    table = ARCHITECTURES[arch]
    kind = CONFIG_MAPPING[table["type"]]
    prefix = f"{arch}."
    _check_types(file.fields, prefix)
    attributes = inspect.signature(kind).parameters.keys() | kind.attribute_map
    fields = {key.removeprefix(prefix): value for key, value in file.fields.items() if key.startswith(prefix)}
    fields = {name: value if name == _WINDOW_PATTERN else _scalar(value) for name, value in fields.items()}
    defaults = _defaults(fields)
    if fields.get("block_count", 1) not in range(1, _MAX_BLOCKS + 1):
        raise unreadable(f"has `{prefix}block_count` = {fields['block_count']!r}"[:100])
    settings = _settings_of_tensors(file, table)
    if table.get("rotation") != "none":
        settings["rope_parameters"] = _rope_parameters(file, fields)
        if "original_max_position_embeddings" in attributes:
            original = settings["rope_parameters"].get("original_max_position_embeddings", fields.get("context_length"))
            settings["original_max_position_embeddings"] = original
    if "windows" in table:
        settings |= _window_settings(fields, defaults, settings["rope_parameters"], table["windows"])
    mask = table.get("mask")
    if mask is None and not fields.pop("attention.causal"):
        settings["is_causal"] = False
    elif mask != "none" and pooling_name(file) is None:  # it was not tuned to embed texts
        settings["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[table["type"]]]
    defaults["attention.causal"] = mask != "none"
    for name, attribute in (_TABLES["fields"] | table.get("fields", {})).items():
        if attribute == "":
            fields.pop(name, None)
        elif attribute in attributes:
            if name not in fields and name not in defaults:
                raise unreadable(f"lacks the field `{prefix}{name}`")
            settings[attribute] = fields.pop(name, defaults.get(name))
            if type(settings[attribute]) is int and settings[attribute] < 1:
                raise unreadable(f"has `{prefix}{name}` = {settings[attribute]}")
            if isinstance(settings[attribute], list):
                raise unreadable(f"has another `{prefix}{name}` for each block, which transformers does not support")
    if "num_kv_heads" in settings:
        grouped = settings["num_kv_heads"] > 1
        settings |= {"multi_query": not grouped, "new_decoder_architecture": grouped}
    for name, value in fields.items():
        if name not in defaults or value != defaults[name]:
            reason = f"has `{prefix}{name}` = {value!r}"[:100]
            raise unreadable(f"{reason}, which transformers' {kind.__name__} cannot express")
    try:
        config = kind(**settings)
    except Exception as error:  # configs check their settings in their own ways
        raise unreadable(f"cannot be expressed by transformers' {kind.__name__}: {error_summary(error)}") from error
    if changed := [name for name, value in settings.items() if getattr(config, name) != value]:
        raise unreadable(f"cannot be expressed by transformers' {kind.__name__}, which changes `{changed[0]}`")
    return config


def _check_types(fields: dict[str, Any], prefix: str) -> None:
    """Raise if a field has another type than llama.cpp reads: a number, unless the tables name another type."""
    for name, value in fields.items():
        default = "number" if name.startswith(prefix) or name.endswith("_token_id") else ""
        types = _TYPES.get(name.removeprefix(prefix), default)
        if types and not any(_is_of_type(value, expected) for expected in types.split(" or ")):
            raise unreadable(f"has `{name}` = {value!r}"[:100] + f", but llama.cpp reads a field of the type {types!r}")


def _is_of_type(value: Any, expected: str) -> bool:
    """Return whether a value has a type; a plural is a list.

    Example:
        >>> _is_of_type([4, 2], "numbers"), _is_of_type([4, 2], "number"), _is_of_type("4", "number")
        (True, False, False)
    """
    items = value if isinstance(value, list) else [value]
    is_list = expected.endswith("s")
    return isinstance(value, list) == is_list and {type(item) for item in items} <= _CLASSES[expected.removesuffix("s")]


def _scalar(value: Any) -> Any:
    """Return the value of a field; if it lists the same number for each block, that number."""
    return value[0] if isinstance(value, list) and value and all(item == value[0] for item in value) else value


def _defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the values that llama.cpp takes for absent fields, after adding the sizes of a head."""
    width, heads = fields.get("embedding_length"), fields.get("attention.head_count")
    size = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 0
    key_size = fields.setdefault("attention.key_length", size)
    fields.setdefault("attention.value_length", size)
    fields.setdefault("attention.causal", True)
    return {
        "attention.head_count_kv": heads,
        "attention.key_length": size,
        "attention.value_length": key_size,
        "attention.key_length_swa": key_size,
        "attention.value_length_swa": key_size,
        "rope.dimension_count_swa": fields.get("rope.dimension_count", key_size),
        "embedding_length_out": width,
        "attn_logit_softcapping": 50.0,
        "rope.scaling.yarn_beta_fast": 32.0,
        **dict.fromkeys(
            ("rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), 1.0
        ),
        **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier", "attention.clamp_kqv"), 0.0),
        **dict.fromkeys(("expert_count", "expert_used_count", "nextn_predict_layers", "attention.sliding_window"), 0),
        "ssm.dt_b_c_rms": False,
    }


def _settings_of_tensors(file: GgufFile, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that depend on the tokens, on shapes, and on which tensors a file has."""
    rows = {name: tensor.shape[0] for name, tensor in file.tensors.items()}
    if "token_embd.weight" not in rows:
        raise unreadable("lacks the tensor `token_embd.weight`")
    settings: dict[str, Any] = {"vocab_size": rows["token_embd.weight"]}
    if (count := len(file.fields.get("tokenizer.ggml.tokens", ()))) != settings["vocab_size"]:
        raise unreadable(f"has {count:,} tokens, but embeddings of {settings['vocab_size']:,}")
    settings["tie_word_embeddings"] = "output.weight" not in rows
    if "token_types.weight" in rows:
        settings["type_vocab_size"] = rows["token_types.weight"]
    for name, role in _SPECIAL_TOKENS.items():
        number = file.fields.get(f"tokenizer.ggml.{role}_token_id")
        settings[name] = number if number is not None and number < settings["vocab_size"] else None
    for attribute, rule in table.get("by_tensors", {}).items():
        present, absent = rule["values"]
        names = {f"{prefix}blk.0.{name}" for name in rule["tensors"] for prefix in ("", "enc.")}
        settings[attribute] = present if names & rows.keys() else absent
    return settings


def frequency_divisors(file: GgufFile) -> dict[str, list[float]]:
    """Return the tensors with divisors of the rotary frequencies that llama.cpp reads, by name."""
    arch = architecture(file)
    names = ARCHITECTURES[arch].get("factors", ())
    is_long = file.fields.get(f"{arch}.rope.scaling.type") == "longrope" or "rope_freqs.weight" not in names
    read = [name for name in names if name.startswith("rope_factors_") == is_long and name in file.tensors]
    for name in read:
        if file.tensors[name].kind != 0:
            raise unreadable(f"has a tensor {name} that is not in float32, which llama.cpp requires")
    return {name: file.tensors[name].values().tolist() for name in read}


def _rope_parameters(file: GgufFile, fields: dict[str, Any]) -> dict[str, Any]:
    """Return transformers' parameters of the rotary embedding, and remove its fields.

    llama.cpp divides the frequencies by the factor and by a tensor's divisors, whatever the type is; of the two tensors
    of LongRoPE it takes one by the size of the context, transformers by the length of the text.
    """
    head_size, context = fields["attention.key_length"], fields.get("context_length")
    table = ARCHITECTURES[architecture(file)]
    rotated = fields.pop("rope.dimension_count", head_size)
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope.freq_base", 10_000.0)}
    if table.get("rotation") == "part" and 0 < rotated <= head_size and rotated % 2 == 0:
        share = rotated / head_size
        is_rounded = int(head_size * share) < rotated
        rope["partial_rotary_factor"] = math.nextafter(share, 1) if is_rounded else share
    elif rotated != head_size:
        raise unreadable(f"rotates {rotated} of {head_size} dimensions of each head, which transformers cannot")
    kind = fields.pop("rope.scaling.type", "linear")
    old_factor = fields.pop("rope.scale_linear", 0.0)
    factor = fields.pop("rope.scaling.factor", old_factor) or 1.0
    if kind == "none":
        if factor != 1 and table.get("windows", {}).get("own_base") is False:
            raise unreadable(f"has `rope.scaling.factor` = {factor} of the type 'none', for blocks with a window alone")
        factor = 1.0
    attention_factor = fields.pop("rope.scaling.attn_factor", 1.0)
    if attention_factor != 1 and table.get("windows", {}).get("own_base"):
        raise unreadable("scales the attention of blocks with a window, too, by `rope.scaling.attn_factor`")
    original = fields.pop("rope.scaling.original_context_length", context)
    fields.pop("rope.scaling.finetuned", None)
    divisors = frequency_divisors(file)
    if original == 0:
        raise unreadable("has `rope.scaling.original_context_length` = 0")
    if kind not in ("none", "linear", "yarn", "longrope") or (kind == "yarn" and divisors):
        raise unreadable(f"scales its rotary embedding by {kind!r}{' and by a tensor' if divisors else ''}")
    for name in divisors:
        if (shape := file.tensors[name].shape) != (rotated // 2,):
            raise unreadable(f"has a tensor {name} of shape {shape}, but rotates {rotated} dimensions of each head")
    if kind == "yarn":
        if original and not _has_yarn_ramp(rope["rope_theta"], rotated, original):
            raise unreadable(f"has a context of {original} before scaling by yarn, which transformers reads otherwise")
        attention_factor *= 1 + 0.1 * math.log(max(factor, 1.0))
        settings = {"factor": factor, "attention_factor": attention_factor}
        return rope | settings | {"rope_type": "yarn", "original_max_position_embeddings": original}
    if divisors or attention_factor != 1:
        always = divisors.get("rope_freqs.weight", [1.0] * (rotated // 2))
        settings = {
            f"{name}_factor": [factor * item for item in divisors.get(f"rope_factors_{name}.weight", always)]
            for name in ("short", "long")
        } | {"attention_factor": attention_factor}
        return rope | settings | {"rope_type": "longrope", "original_max_position_embeddings": original}
    return rope if factor == 1 else rope | {"rope_type": "linear", "factor": factor}


def _has_yarn_ramp(base: float, rotated: int, original: int) -> bool:
    """Return whether some dimension lies between those that YaRN scales and those that it keeps."""
    if base <= 1:
        return False
    low, high = (rotated * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (32, 1))
    return math.floor(low) < rotated and math.ceil(high) >= 0


def _window_settings(
    fields: dict[str, Any], defaults: dict[str, Any], rope: dict[str, Any], windows: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of an architecture in which some blocks have a window, and remove their fields."""
    size = fields.pop("attention.sliding_window", windows["size"])
    flags = fields.pop(_WINDOW_PATTERN, windows["period"])
    depth = fields.get("block_count", 0)
    if size != windows["size"] and size not in range(1, 2**31):
        raise unreadable(f"has `attention.sliding_window` = {size!r}")
    if isinstance(flags, int):
        flags = [flags == 0 or block % flags < flags - 1 for block in range(depth)]
    if len(flags) != depth:
        raise unreadable(f"has {len(flags)} entries in `{_WINDOW_PATTERN}` for {depth} blocks")
    has_window = [bool(size and flag) for flag in flags]
    scale = fields["attention.key_length"]
    if depth == windows["depth_of_27b"]:  # llama.cpp recognizes the 27B models by their depth
        scale = fields["embedding_length"] // fields["attention.head_count"]
    if windows["own_base"]:
        local = {"rope_type": "default", "rope_theta": fields.pop("rope.freq_base_swa", 10_000.0)}
        rope_parameters = {"full_attention": rope, "sliding_attention": local}
    else:
        rope_parameters = rope
        defaults["rope.freq_base_swa"] = rope["rope_theta"]
    types = ["sliding_attention" if window else "full_attention" for window in has_window]
    settings = {"sliding_window": size, "layer_types": types, "query_pre_attn_scalar": scale}
    return settings | {"rope_parameters": rope_parameters}
