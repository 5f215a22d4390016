"""What every target shares: packages that may be missing, sample inputs, how far two engines' vectors are apart."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from midlayer_encoders.encoder.inputs import probe_inputs
from midlayer_encoders.errors import MidlayerError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = [
    "Exported",
    "cosine",
    "needed",
    "relative_error",
    "sample_inputs",
    "seeing_a_full_disk",
    "versions",
    "write_card",
]

CARD = "midlayer.json"
_LITTLE = 2**16  # bytes that a disk which ended a file has left
_NUMPY_FULL = "Not enough free space"  # `tofile` asks for room first, and writes nothing
_TEXTS = (
    "How do I reset the PIN of my card?",
    "Stock markets fell sharply today, and most of what was left of the gains of this year was lost within hours.",
    "It's 17:45 on 3 March 2026; don't wait for all 1234 of them.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
)


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares with the encoder.

    Attributes:
        target: the engine.
        folder: where it is.
        engine: name and version of what ran it; ``None`` where that is not installed.
        error: largest distance of a vector from the encoder's, relative to its length, over sample inputs; for
            ``"gguf"`` one minus the smallest cosine.
        int8_cosine: smallest cosine of the graph of 8-bit integers with the encoder, where there is one.
        files: that were written, from the folder on; others may lie beside them.
    """

    target: str
    folder: Path
    engine: str | None = None
    error: float | None = None
    int8_cosine: float | None = None
    files: tuple[str, ...] = ()


def needed(extra: str, *packages: str) -> list[Any]:
    """Return packages that a target needs, or raise with the line that installs them."""
    try:
        return [importlib.import_module(name) for name in packages]
    except ImportError as reason:
        raise MidlayerError(
            f"The target {extra!r} needs {' and '.join(packages)}, and {reason.name or reason} is not installed: "
            f"pip install 'midlayer-encoders[{extra}]'."
        ) from reason


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages by name."""
    return {name: importlib.metadata.version(name) for name in packages}


@contextmanager
def seeing_a_full_disk(folder: Path) -> Iterator[None]:
    """Raise an :class:`OSError` where an engine could not write on a full disk, which its own error does not say."""
    try:
        yield
    except Exception as reason:
        little = shutil.disk_usage(folder).free <= _LITTLE or str(reason).startswith(_NUMPY_FULL)
        if getattr(reason, "errno", None) is not None or not little:
            raise
        raise OSError(errno.ENOSPC, f"no room for what is written ({reason})", str(folder)) from reason


def sample_inputs(encoder: LayerEncoder, medium: str) -> list[Any]:
    """Return inputs to compare by: short ones and longer ones."""
    tokenizer = encoder.tokenizer if medium == "text" else None
    made = [one for one in probe_inputs([medium], None, tokenizer) if one is not None]
    if medium == "text":
        return [*made, *_TEXTS]
    return [*made, *(one.rotate(90 * turns) for one in made for turns in (1, 2))]


def relative_error(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    r"""Return the largest :math:`\|x - y\| / \|x\|` of rows; infinity where they differ in shape or are not finite.

    Example:
        >>> round(relative_error(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[3.0, 4.5], [0.0, 0.0]])), 6)
        0.1
    """
    if ours.shape != theirs.shape or not np.isfinite(theirs).all():
        return float("inf")
    distance = np.linalg.norm(ours.astype(np.float64) - theirs, axis=1)
    length = np.linalg.norm(ours.astype(np.float64), axis=1)
    return float(np.divide(distance, length, out=np.where(distance > 0, np.inf, 0.0), where=length > 0).max())


def cosine(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Return the smallest cosine of rows, ``-1`` where they differ in shape or are not finite.

    Example:
        >>> cosine(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([[2.0, 0.0], [3.0, 3.0]])) > 0.999
        True
    """
    if ours.shape != theirs.shape or not np.isfinite(theirs).all():
        return -1.0
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.divide((a * b).sum(axis=1), lengths, out=np.zeros(len(a)), where=lengths > 0).min())


def write_card(folder: Path, encoder: LayerEncoder, target: str, **more: Any) -> None:
    """Write what a folder holds, as JSON."""
    spec = encoder.spec
    card = {
        "target": target,
        "model": spec.model,
        "revision": spec.revision,
        "layer": encoder.tower_layers or [layer for layer, _ in encoder.mixture] or spec.layer,
        "num_layers": spec.num_layers,
        "norm": spec.norm,
        "pooling": spec.pooling,
        "weights": spec.weights_digest,
        "max_length": spec.max_length,
        "prompt": encoder.default_prompt,
        "prompts": {name: text for name, text in encoder.prompts.items() if text},
        **more,
    }
    text = json.dumps(card, indent=2, ensure_ascii=False)
    (folder / CARD).write_text(text + "\n", encoding="utf8")
