"""Export folders for vLLM."""

import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midlayer_encoders.encoder.saving import LOADER_FILES, check_folder
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import CutError
from midlayer_encoders.extras.export import _comparison
from midlayer_encoders.extras.export._engines import engine_vectors
from midlayer_encoders.files import read_json, shell_path, write_folder, write_json

logger = logging.getLogger(__name__)

# Model types whose vectors were compared with vLLM 0.32 (tests/export/test_vllm.py).
_VLLM_TYPES = (
    "bert", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "modernbert", "olmo2",
    "opt", "phi3", "qwen2", "qwen3", "roberta", "smollm3", "xlm-roberta",
)  # fmt: skip
# vLLM applies `is_causal: false` to these and ignores it in all others.
_BIDIRECTIONAL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
# The settings of a first module that returns the last hidden state of a text model.
_TEXT_MODULE = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
_POOLING_KEYS = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}  # of `_comparison`'s poolings
# Names in transformers 4 of the entries of `rope_parameters`, unless they are `rope_theta`.
_ROPE_NAMES = {
    "gpt_neox": {"": "rotary_emb_base"},
    "modernbert": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
}
_ROTARY_SHARES = {"gpt_neox": "rotary_pct"}
_ABSOLUTE_POSITIONS = ("camembert", "roberta", "xlm-roberta")  # vLLM 0.32 requires the name of the position embeddings
_MAX_ERROR = 1e-4  # relative, in float32
_MAX_ERROR_IN_HALF_PRECISION = 5e-2


def export_vllm(encoder: LayerEncoder, folder: Path) -> _comparison.Exported:
    """Write a folder for vLLM, and compare its vectors with the encoder's if vLLM is installed.

    Args:
        encoder: a text encoder.
        folder: output folder.
    """
    if (obstacle := _obstacle(encoder)) is not None:
        raise _refusal(encoder, obstacle)
    error: float | None = None

    def write(staging: Path) -> None:
        nonlocal error
        encoder.save(str(staging))
        if read_json(staging / "sentence_bert_config.json") != _TEXT_MODULE:
            raise _refusal(encoder, "its first module reads states other than the model's output")
        _, first, *later = (type(module).__name__ for module in encoder)
        if first != "Pooling" or not set(later) <= {"Dense", "Normalize"}:
            raise _refusal(encoder, f"it runs a Pooling, Dense and Normalize, not {', '.join([first, *later])}")
        _write_old_names(staging, encoder.max_seq_length)
        error = _compare_vllm(encoder, staging)
        check_folder(encoder, staging, folder)
        packages = _comparison.versions("torch", "transformers") | (_vllm_version() if error is not None else {})
        serve = serving_line(encoder, ".")
        _comparison.write_card(staging, encoder, "vllm", error=error, versions=packages, serve=serve)

    files = write_folder(folder, write, last=LOADER_FILES)
    if encoder.default_prompt:
        logger.warning("vLLM does not add the default prompt: prepend %r to texts.", encoder.default_prompt)
    engine = None if error is None else " ".join(["vLLM", *_vllm_version().values()])
    return _comparison.Exported("vllm", folder, engine, error, files=files)


def _write_old_names(folder: Path, max_length: int | None) -> None:
    """Write the settings of a plain folder under the names that vLLM reads; sentence-transformers reads both.

    vLLM knows modules and poolings by their names in sentence-transformers 5.3. Its releases on transformers 4 would
    silently ignore rotary settings under their new names.
    """
    modules = read_json(folder / "modules.json")
    for entry in modules:
        name = entry["type"].rpartition(".")[2]
        entry["type"] = f"sentence_transformers.models.{name}"
        if name == "Pooling":
            path = folder / entry["path"] / "config.json"
            pooling = read_json(path)
            modes = {f"pooling_mode_{key}": mode == pooling["pooling_mode"] for mode, key in _POOLING_KEYS.items()}
            write_json(path, {"word_embedding_dimension": pooling["embedding_dimension"], **pooling, **modes})
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    tokenizer = read_json(folder / "tokenizer_config.json")
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        write_json(folder / "tokenizer_config.json", {**tokenizer, "tokenizer_class": "PreTrainedTokenizerFast"})
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**_old_settings(config), **config})


def _old_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model that transformers 4 names in another way."""
    model_type = config["model_type"]
    settings: dict[str, Any] = {}
    if model_type in _ABSOLUTE_POSITIONS:
        settings["position_embedding_type"] = "absolute"
    rope = config.get("rope_parameters") or {}
    for attention, name in _ROPE_NAMES.get(model_type, {"": "rope_theta"}).items():
        entry = rope.get(attention) if attention else rope
        if isinstance(entry, dict) and "rope_theta" in entry:
            settings[name] = entry["rope_theta"]
    main = rope.get("full_attention", rope)
    if "partial_rotary_factor" in main:
        settings[_ROTARY_SHARES.get(model_type, "partial_rotary_factor")] = main["partial_rotary_factor"]
    scaling = {name: value for name, value in main.items() if name not in ("rope_theta", "partial_rotary_factor")}
    if scaling.get("rope_type", "default") != "default":
        settings["rope_scaling"] = {**scaling, "type": scaling["rope_type"]}
    return settings


def serving_line(encoder: LayerEncoder, folder: Path | str) -> str:
    """Return the shell command that serves an exported folder."""
    dtype = str(encoder.dtype).removeprefix("torch.")
    return f"vllm serve {shell_path(folder)} --runner pooling --dtype {dtype}"


def _refusal(encoder: LayerEncoder, reason: str) -> CutError:
    return CutError(f"vLLM cannot serve this encoder of {encoder.name}: {reason}.")


def _obstacle(encoder: LayerEncoder) -> str | None:
    """Return why vLLM would produce other vectors, or None."""
    if (obstacle := _comparison.common_obstacle(encoder)) is not None:
        return obstacle
    config: Any = encoder.transformer.config
    model_type = config.model_type
    if encoder.options.chat_template:
        return "it applies no chat template before embedding: leave out `chat_template`"
    if _has_vllm():
        return None
    if model_type not in _VLLM_TYPES:
        return f"its {model_type!r} was not compared, only {', '.join(_VLLM_TYPES)}. Install vLLM here to compare"
    if encoder.options.bidirectional and model_type not in _BIDIRECTIONAL_TYPES:
        return f"it keeps the causal mask of model type {model_type!r}: leave out `bidirectional`"
    return None


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _vllm_version() -> dict[str, str]:
    """Return the name and version of the distribution that provides vLLM."""
    return _comparison.versions(*importlib.metadata.packages_distributions().get("vllm", []))


def _compare_vllm(encoder: LayerEncoder, folder: Path) -> float | None:
    """Return the relative error of vLLM's vectors, or None if vLLM is not installed."""
    if not _has_vllm():
        logger.warning("The vectors were not compared, because vLLM is not installed in this environment.")
        return None
    texts = _comparison.sample_inputs(encoder, "text")
    prompted = [encoder.default_prompt + text for text in texts]
    try:
        vectors = engine_vectors("vllm", folder, prompted, str(encoder.dtype).removeprefix("torch."))
    except RuntimeError as reason:
        raise _refusal(encoder, f"it does not load the folder ({reason})") from reason
    error = _comparison.relative_error(encoder.encode(texts, show_progress_bar=False), np.array(vectors))
    if not error <= (_MAX_ERROR if encoder.dtype == torch.float32 else _MAX_ERROR_IN_HALF_PRECISION):
        raise _refusal(encoder, f"its vectors differ by a relative error of {error:.1e}")
    return error
