"""The medium of an input, and the image or audio files of a folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from midlayer_encoders._types import MAX_PIXELS, Medium
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.files import exists, expand_home
from midlayer_encoders.media._arrays import InputError
from midlayer_encoders.media.audio import read_audio
from midlayer_encoders.media.images import is_pil, read_image
from midlayer_encoders.validation import check_choice, check_count

_SUFFIXES: dict[Medium, tuple[str, ...]] = {
    "image": (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp"),
    "audio": (".wav", ".flac", ".ogg", ".mp3"),
}
_WORDS = {"text": "a text", "image": "an image", "audio": "a waveform"}

_log = logging.getLogger(__name__)


def medium_of(item: Any, accepted: Sequence[str]) -> Medium:
    """Return the medium of an input for a model with these accepted media.

    For a model that accepts texts, a string is a text unless it is the path of an image or audio file that the model
    also accepts; for other models, it is a path. An array with three axes is an image. An array with two axes is
    multichannel audio for audio models and a grayscale image for others.

    Example:
        >>> medium_of("a text", ["text", "image"]), medium_of("a.png", ["image"]), medium_of(([0.0], 16000), ["audio"])
        ('text', 'image', 'audio')
    """
    if isinstance(item, str | Path):
        by_suffix: Medium = next(
            (kind for kind, suffixes in _SUFFIXES.items() if str(item).lower().endswith(suffixes)), "text"
        )
        if isinstance(item, str) and "text" in accepted:
            return by_suffix if by_suffix in accepted and exists(Path(item)) else "text"
        if "image" in accepted or "audio" in accepted:
            return "image" if "image" in accepted else "audio"
        return by_suffix
    if is_pil(item):
        return "image"
    if hasattr(item, "get_all_samples") or _is_waveform(item):
        return "audio"
    axes = getattr(item, "ndim", 0)
    if not isinstance(axes, int) or axes < 1:
        raise InputError(
            f"`inputs` must each be {_listed(accepted)}, but got {short_repr(item)} ({type(item).__name__})."
        )
    return "image" if axes == 3 or (axes == 2 and "audio" not in accepted) else "audio"


def _is_waveform(item: Any) -> bool:
    """Return True if an input has the form of samples with a rate, valid or not."""
    if isinstance(item, Mapping):
        return "array" in item or "sampling_rate" in item
    return isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], str)


def _listed(accepted: Sequence[str]) -> str:
    return " or ".join(_WORDS[medium] for medium in accepted if medium in _WORDS)


def check_taken(medium: Medium, accepted: Sequence[str], item: Any, *, model: str) -> None:
    """Raise an :class:`InputError` unless ``medium`` is one of the accepted media of ``model``."""
    if medium not in accepted:
        raise InputError(
            f"`inputs` must each be {_listed(accepted)} for {model}, but got {_WORDS[medium]}: {short_repr(item)}. "
            "Choose a model that takes it."
        )


def media_files(
    folder: Path | str, medium: Literal["image", "audio"], *, bad: str = "refuse", max_pixels: int = MAX_PIXELS
) -> list[Path]:
    """Return the image or audio files in a folder and its subfolders, sorted by path.

    Args:
        folder: the folder.
        medium: ``"image"`` or ``"audio"``.
        bad: ``"refuse"`` raises an error for the first unreadable file; ``"skip"`` logs and omits unreadable files.
        max_pixels: limit for an image.
    """
    check_choice("medium", medium, _SUFFIXES)
    check_choice("bad", bad, ("refuse", "skip"))
    max_pixels = check_count("max_pixels", max_pixels, "pixels")
    folder = expand_home(folder)
    if not folder.is_dir():
        raise OptionError(f"`folder` must be a folder of files, but there is none at {folder}.")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES[medium] and path.is_file())
    readable = [path for path in paths if _is_readable(path, medium, bad, max_pixels)]
    if not readable:
        raise OptionError(
            f"`folder` must hold at least one readable file ({', '.join(_SUFFIXES[medium])}), but {folder} has "
            f"{len(paths)}, none of which can be read."
        )
    return readable


def _is_readable(path: Path, medium: str, bad: str, max_pixels: int) -> bool:
    try:
        _ = read_image(path, max_pixels=max_pixels) if medium == "image" else read_audio(path)
    except InputError as error:
        if bad == "refuse":
            raise
        _log.warning("Skipped: %s", error)
        return False
    return True
