"""Export folders for vLLM."""

import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midlayer_encoders.encoder.older_versions import LOADER_FILES, make_readable_by_older
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import CutError
from midlayer_encoders.export import _comparison
from midlayer_encoders.export._engines import engine_vectors
from midlayer_encoders.files import read_json, shell_path, write_folder

logger = logging.getLogger(__name__)

# Model types whose vectors were compared with vLLM 0.32 (tests/export/test_vllm.py).
_VLLM_TYPES = (
    "bert", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "modernbert", "olmo2",
    "opt", "phi3", "qwen2", "qwen3", "roberta", "smollm3", "xlm-roberta",
)  # fmt: skip
# vLLM applies `is_causal: false` to these and ignores it in all others.
_BIDIRECTIONAL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
_MAX_ERROR = 1e-4  # relative, in float32
_MAX_ERROR_IN_HALF_PRECISION = 5e-2


def export_vllm(encoder: LayerEncoder, folder: Path) -> _comparison.Exported:
    """Write a folder for vLLM, and compare its vectors with the encoder's if vLLM is installed.

    Args:
        encoder: a text encoder.
        folder: output folder.
    """
    obstacle = _obstacle(encoder)
    if obstacle is not None:
        raise _refusal(encoder, obstacle)
    error: float | None = None

    def write(staging: Path) -> None:
        nonlocal error
        encoder.save(str(staging))
        make_readable_by_older(staging, encoder.max_seq_length, always=True)
        modules = read_json(staging / "modules.json")
        if not all(module["type"].startswith("sentence_transformers.models.") for module in modules):
            raise _refusal(encoder, "its first module reads states other than the model's output")
        error = _compare_vllm(encoder, staging)
        encoder.check_folder(staging, folder)
        packages = _comparison.versions("torch", "transformers") | (_vllm_version() if error is not None else {})
        serve = serving_line(encoder, ".")
        _comparison.write_card(staging, encoder, "vllm", error=error, versions=packages, serve=serve)

    files = write_folder(folder, write, last=LOADER_FILES)
    if encoder.default_prompt:
        logger.warning("vLLM does not add the default prompt: prepend %r to texts.", encoder.default_prompt)
    engine = None if error is None else " ".join(["vLLM", *_vllm_version().values()])
    return _comparison.Exported("vllm", folder, engine, error, files=files)


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
