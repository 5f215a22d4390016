"""Export folders for vLLM and text-embeddings-inference."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import shlex
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from midlayer_encoders.encoder.older_versions import LOADER_FILES, make_readable_by_older
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import CutError
from midlayer_encoders.export import _comparison
from midlayer_encoders.export._engines import engine_vectors
from midlayer_encoders.files import read_json, shell_path, write_folder, write_json

logger = logging.getLogger(__name__)

_NAMES = {"vllm": "vLLM", "tei": "text-embeddings-inference"}
# Model types whose vectors were compared with vLLM 0.32 (tests/export/test_vllm.py).
_VLLM_TYPES = (
    "bert", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "modernbert", "olmo2",
    "opt", "phi3", "qwen2", "qwen3", "roberta", "smollm3", "xlm-roberta",
)  # fmt: skip
# vLLM applies `is_causal: false` to these and ignores it in all others.
_BIDIRECTIONAL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
# From the source of text-embeddings-inference 1.9.3, which is not on PyPI and was not run.
_TEI_CUDA_TYPES = ("llama", "mistral", "qwen2")  # float16 on NVIDIA GPUs only
_TEI_LAST_TOKEN_TYPES = (*_TEI_CUDA_TYPES, "gemma3_text", "qwen3")
_TEI_BERT_TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "modernbert")
_TEI_TYPES = (*_TEI_BERT_TYPES, *_TEI_LAST_TOKEN_TYPES)
_MAX_ERROR = 1e-4  # relative, in float32
_MAX_ERROR_IN_HALF_PRECISION = 5e-2


def export_served(encoder: LayerEncoder, folder: Path, target: Literal["vllm", "tei"]) -> _comparison.Exported:
    """Write a folder for a server, and compare vLLM's vectors with the encoder's if vLLM is installed.

    Args:
        encoder: a text encoder at one layer.
        folder: output folder.
        target: the server.
    """
    obstacle = _obstacle(encoder, target)
    if obstacle is not None:
        raise _refusal(encoder, target, obstacle)
    error: float | None = None

    def write(staging: Path) -> None:
        nonlocal error
        encoder.save(str(staging))
        make_readable_by_older(staging, encoder.max_seq_length, always=True)
        modules = read_json(staging / "modules.json")
        if not all(module["type"].startswith("sentence_transformers.models.") for module in modules):
            raise _refusal(encoder, target, "its first module reads states other than the model's output")
        if target == "vllm":
            error = _compare_vllm(encoder, staging)
        else:
            _drop_nested_rope_parameters(staging / "config.json")
            _verify_tokenizer_file(encoder, staging)
        encoder.check_folder(staging, folder)
        packages = _comparison.versions("torch", "transformers") | (_vllm_version() if error is not None else {})
        serve = serving_line(encoder, target, ".")
        _comparison.write_card(staging, encoder, target, error=error, versions=packages, serve=serve)

    files = write_folder(folder, write, last=LOADER_FILES)
    if encoder.default_prompt:
        cure = f"prepend {encoder.default_prompt!r} to texts" if target == "vllm" else "pass --default-prompt-name"
        logger.warning("%s does not add the default prompt: %s.", _NAMES[target], cure)
    engine = None if error is None else " ".join(["vLLM", *_vllm_version().values()])
    return _comparison.Exported(target, folder, engine, error, files=files)


def serving_line(encoder: LayerEncoder, target: str, folder: Path | str) -> str:
    """Return the shell command that serves an exported folder."""
    path = shell_path(folder)
    if target == "vllm":
        return f"vllm serve {path} --runner pooling --dtype {str(encoder.dtype).removeprefix('torch.')}"
    config: Any = encoder.transformer.config
    dtype = "float16" if config.model_type in _TEI_CUDA_TYPES else "float32"
    name = shlex.quote(encoder.default_prompt_name or "")
    prompt = f" --default-prompt-name {name}" if encoder.default_prompt else ""
    return f"text-embeddings-router --model-id {path} --dtype {dtype}{prompt}"


def _refusal(encoder: LayerEncoder, target: str, reason: str) -> CutError:
    return CutError(f"{_NAMES[target]} cannot serve this encoder of {encoder.name}: {reason}.")


def _obstacle(encoder: LayerEncoder, target: str) -> str | None:
    """Return why a server would produce other vectors, or None."""
    if (obstacle := _comparison.common_obstacle(encoder)) is not None:
        return obstacle
    config: Any = encoder.transformer.config
    model_type = config.model_type
    bidirectional = encoder.options.bidirectional
    if encoder.options.chat_template:
        return "it applies no chat template before embedding: leave out `chat_template`"
    if target == "tei":
        if bidirectional:
            return "it ignores `is_causal` in config.json: leave out `bidirectional`"
        if model_type not in _TEI_TYPES:
            return f"it does not support model type {model_type!r}. Supported types: {', '.join(_TEI_TYPES)}"
        if encoder.pooling == "last" and model_type not in _TEI_LAST_TOKEN_TYPES:
            return f"it has no last-token pooling for model type {model_type!r}: pass pooling='mean' or 'cls'"
        if getattr(config, "use_sliding_window", False):
            return f"it has no sliding windows for model type {model_type!r}"
    elif not _has_vllm():
        if model_type not in _VLLM_TYPES:
            return f"its {model_type!r} was not compared, only {', '.join(_VLLM_TYPES)}. Install vLLM here to compare"
        if bidirectional and model_type not in _BIDIRECTIONAL_TYPES:
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
        raise _refusal(encoder, "vllm", f"it does not load the folder ({reason})") from reason
    error = _comparison.relative_error(encoder.encode(texts, show_progress_bar=False), np.array(vectors))
    if not error <= (_MAX_ERROR if encoder.dtype == torch.float32 else _MAX_ERROR_IN_HALF_PRECISION):
        raise _refusal(encoder, "vllm", f"its vectors differ by a relative error of {error:.1e}")
    return error


def _verify_tokenizer_file(encoder: LayerEncoder, folder: Path) -> None:
    """Verify that tokenizer.json, the only tokenizer file that the server reads, yields the encoder's tokens."""
    from tokenizers import Tokenizer

    samples = _comparison.sample_inputs(encoder, "text")
    texts = [*samples, " ".join(samples) * 3]
    max_length = min(encoder.max_seq_length or 64, 64)  # truncates the longest text
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    expected = encoder.tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    if [encoding.ids for encoding in tokenizer.encode_batch(texts)] != [list(ids) for ids in expected]:
        raise _refusal(encoder, "tei", "it reads only tokenizer.json, which yields other tokens")


def _drop_nested_rope_parameters(path: Path) -> None:
    """Remove rotary settings per layer type, which text-embeddings-inference cannot parse; the older keys remain."""
    config = read_json(path)
    if any(isinstance(value, dict) for value in (config.get("rope_parameters") or {}).values()):
        write_json(path, {name: value for name, value in config.items() if name != "rope_parameters"})
