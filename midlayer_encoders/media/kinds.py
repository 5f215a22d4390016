"""Which medium an input is, whether a model takes it, and the files of a folder."""

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


def medium_of(item: Any, taken: Sequence[str]) -> Medium:
    """Return what an input is, for a model that takes these media.

    A string is a text where the model takes texts, unless it is the path of an image or audio file that the model also
    takes; where it takes none, it is a path. An array of three axes is an image; of two, a grayscale image for a model
    of images and audio of several channels for one of audio.

    Example:
        >>> medium_of("a text", ["text", "image"]), medium_of("a.png", ["image"]), medium_of(([0.0], 16000), ["audio"])
        ('text', 'image', 'audio')
    """
    if isinstance(item, str | Path):
        written: Medium = next(
            (kind for kind, suffixes in _SUFFIXES.items() if str(item).lower().endswith(suffixes)), "text"
        )
        if isinstance(item, str) and "text" in taken:
            return written if written in taken and exists(Path(item)) else "text"
        if "image" in taken or "audio" in taken:
            return "image" if "image" in taken else "audio"
        return written
    if is_pil(item):
        return "image"
    if hasattr(item, "get_all_samples") or _is_waveform(item):
        return "audio"
    axes = getattr(item, "ndim", 0)
    if not isinstance(axes, int) or axes < 1:
        raise InputError(f"`inputs` must each be {_listed(taken)}, but got {short_repr(item)} ({type(item).__name__}).")
    return "image" if axes == 3 or (axes == 2 and "audio" not in taken) else "audio"


def _is_waveform(item: Any) -> bool:
    """Return whether an input is samples with their rate, right or wrong."""
    if isinstance(item, Mapping):
        return "array" in item or "sampling_rate" in item
    return isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], str)


def _listed(taken: Sequence[str]) -> str:
    return " or ".join(_WORDS[kind] for kind in taken if kind in _WORDS)


def check_taken(medium: Medium, taken: Sequence[str], item: Any, *, model: str) -> None:
    """Raise an :class:`InputError` unless a model that takes these media takes this one."""
    if medium not in taken:
        raise InputError(
            f"`inputs` must each be {_listed(taken)} for {model}, but got {_WORDS[medium]}: {short_repr(item)}. "
            "Choose a model that takes it."
        )


def media_files(
    folder: Path | str, medium: Literal["image", "audio"], *, bad: str = "refuse", max_pixels: int = MAX_PIXELS
) -> list[Path]:
    """Return the image or audio files of a folder and those below it, in the order of their paths.

    Args:
        folder: where they are.
        medium: ``"image"`` or ``"audio"``.
        bad: ``"refuse"`` raises at the first file that cannot be read; ``"skip"`` leaves such files out and names each
            in the log.
        max_pixels: of an image.
    """
    check_choice("medium", medium, _SUFFIXES)
    check_choice("bad", bad, ("refuse", "skip"))
    max_pixels = check_count("max_pixels", max_pixels, "pixels")
    folder = expand_home(folder)
    if not folder.is_dir():
        raise OptionError(f"`folder` must be a folder of files, but there is none at {folder}.")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES[medium] and path.is_file())
    kept = [path for path in paths if _readable(path, medium, bad, max_pixels)]
    if not kept:
        raise OptionError(
            f"`folder` must hold at least one readable file ({', '.join(_SUFFIXES[medium])}), but {folder} has "
            f"{len(paths)}, none of which can be read."
        )
    return kept


def _readable(path: Path, medium: str, bad: str, max_pixels: int) -> bool:
    try:
        _ = read_image(path, max_pixels=max_pixels) if medium == "image" else read_audio(path)
    except InputError as reason:
        if bad == "refuse":
            raise
        _log.warning("Left out: %s", reason)
        return False
    return True
