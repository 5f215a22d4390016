"""Code shared by the export targets: optional packages, sample inputs, comparison of vectors, the folder's card."""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midlayer_encoders.encoder.first_module import UncutTransformer
from midlayer_encoders.encoder.probes import probe_inputs
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.files import write_json

CARD = "midlayer.json"
#: Poolings of llama.cpp and vLLM.
ENGINE_POOLINGS = ("mean", "cls", "last")
_TEXTS = (
    "How do I reset the PIN of my card?",
    "Stock markets fell sharply today, and most of what was left of the gains of this year was lost within hours.",
    "It's 17:45 on 3 March 2026; don't wait for all 1234 of them.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
)


@dataclass(frozen=True)
class Exported:
    """An exported folder and its comparison with the encoder.

    Attributes:
        target: the engine.
        folder: output folder.
        engine: name and version of the engine that embedded the samples, or ``None`` if it is not installed.
        error: largest relative error of the engine's vectors over sample inputs; for ``"gguf"``, one minus the
            smallest cosine.
        int8_cosine: smallest cosine between the 8-bit graph and the encoder, if one was written.
        files: written files, relative to the folder.
    """

    target: str
    folder: Path
    engine: str | None = None
    error: float | None = None
    int8_cosine: float | None = None
    files: tuple[str, ...] = ()


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages by name."""
    return {name: importlib.metadata.version(name) for name in packages}


#: Why no engine can run an encoder of an uncut model.
UNCUT = "a cut would change the layers of its model, so hooks read them: use this encoder directly"


def common_obstacle(encoder: LayerEncoder) -> str | None:
    """Return why neither llama.cpp nor vLLM can run an encoder, or None."""
    first: Any = encoder[0]
    if encoder.media != ["text"]:
        return "it embeds only texts"
    if isinstance(first, UncutTransformer):
        return UNCUT
    if any(isinstance(entry["method_output_name"], list) for entry in first.modality_config.values()):
        return "it always applies the final norm: pass norm='final'"
    if encoder.layer == 0:
        return "it runs no model without blocks: pass layer 1 or higher"
    if encoder.spans is not None:
        return "it pools one span of a sequence, and this encoder three: export it for sentence-transformers or onnx"
    if encoder.pooling not in ENGINE_POOLINGS:
        return f"it has no pooling {encoder.pooling!r}: pass {', '.join(map(repr, ENGINE_POOLINGS))}"
    if encoder.leaves_out_prompts and any(encoder.prompts.values()):
        return "it pools the tokens of a prompt: pass prompts={}, or pool them"
    if encoder.truncate_dim is not None:
        return "it returns all dimensions: leave out `truncate_dim`, and truncate the vectors yourself"
    return None


def sample_inputs(encoder: LayerEncoder, medium: str) -> list[Any]:
    """Return short and long inputs to compare vectors on."""
    tokenizer = encoder.tokenizer if medium == "text" else None
    inputs: list[Any] = [sample for sample in probe_inputs([medium], None, tokenizer) if sample is not None]
    if medium == "text":
        return [*inputs, *_TEXTS]
    return [*inputs, *(image.rotate(angle) for image in inputs for angle in (90, 180))]


def relative_error(expected: NDArray[Any], vectors: NDArray[Any]) -> float:
    r"""Return the largest :math:`\|x - y\| / \|x\|` over rows, or infinity if shapes differ or a value is not finite.

    Example:
        >>> round(relative_error(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[3.0, 4.5], [0.0, 0.0]])), 6)
        0.1
    """
    if expected.shape != vectors.shape or not np.isfinite(vectors).all():
        return float("inf")
    distance = np.linalg.norm(expected.astype(np.float64) - vectors, axis=1)
    length = np.linalg.norm(expected.astype(np.float64), axis=1)
    return float(np.divide(distance, length, out=np.where(distance > 0, np.inf, 0.0), where=length > 0).max())


def cosine(expected: NDArray[Any], vectors: NDArray[Any]) -> float:
    """Return the smallest cosine over rows, or ``-1`` if shapes differ or a value is not finite.

    Example:
        >>> cosine(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([[2.0, 0.0], [3.0, 3.0]])) > 0.999
        True
    """
    if expected.shape != vectors.shape or not np.isfinite(vectors).all():
        return -1.0
    a = expected.astype(np.float64)
    b = vectors.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.divide((a * b).sum(axis=1), lengths, out=np.zeros(len(a)), where=lengths > 0).min())


def write_card(folder: Path, encoder: LayerEncoder, target: str, **extra: Any) -> None:
    """Write ``midlayer.json``, which describes the folder."""
    spec = encoder.spec
    card = {
        "target": target,
        "model": spec.model,
        "revision": spec.revision,
        "layer": encoder.layers,
        "num_layers": spec.num_layers,
        "norm": spec.norm,
        "pooling": spec.pooling,
        "weights": spec.weights_digest,
        "max_length": spec.max_length,
        "prompt": encoder.default_prompt,
        "prompts": {name: text for name, text in encoder.prompts.items() if text},
        **extra,
    }
    write_json(folder / CARD, card)
