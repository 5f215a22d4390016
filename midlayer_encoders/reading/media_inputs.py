"""Read images as RGB and audio as one channel, detect the medium of an input, and list the media files of a folder."""

from __future__ import annotations

import importlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from midlayer_encoders._types import MAX_PIXELS, Medium
from midlayer_encoders.errors import MidlayerError, OptionError, short_repr
from midlayer_encoders.files import check_regular_file, exists, expand_home
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_CHANNELS = 16  # an array with more on both axes is not a waveform
_SUFFIXES: dict[Medium, tuple[str, ...]] = {
    "image": (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp"),
    "audio": (".wav", ".flac", ".ogg", ".mp3"),
}
_MEDIUM_NAMES = {"text": "a text", "image": "an image", "audio": "a waveform"}

_log = logging.getLogger(__name__)


class InputError(MidlayerError, ValueError):
    """An image or waveform is unreadable, or the model does not accept its medium.

    Attributes:
        item: the invalid input, if it was one of several.
    """

    def __init__(self, message: str, *, item: Any = None) -> None:
        super().__init__(message)
        self.item = item


@contextmanager
def _explain_read_errors(path: Path, medium: str) -> Iterator[None]:
    """Turn errors while reading a file into an :class:`InputError` that explains them."""
    check_regular_file(path, InputError)
    try:
        with warnings.catch_warnings():
            # Warnings about large images (`max_pixels` limits them), damaged EXIF data and unknown WAV chunks.
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except Exception as error:  # Pillow and SciPy raise many types of errors for damaged files
        raise InputError(f"{path} cannot be read as {medium}: {error}. If damaged, replace or remove it.") from error


def _as_array(source: Any) -> npt.NDArray[Any]:
    """Return an array or tensor as a NumPy array."""
    if hasattr(source, "detach"):  # a tensor on any device
        source = source.detach().cpu()
        source = (source.float() if source.is_floating_point() else source).numpy()  # NumPy has no bfloat16
    if not isinstance(source, np.ndarray) or source.dtype.kind not in "buif":
        raise InputError(
            "`inputs` must be PIL images, paths, arrays or tensors of real numbers, or for audio (array, rate), "
            f"but got a {type(source).__name__}: {short_repr(source)}."
        )
    return source


def read_image(source: Any, *, max_pixels: int = MAX_PIXELS) -> Image:
    """Return an image in RGB.

    Grayscale images, palettes and 16-bit images are converted, and transparent images are composited onto white. EXIF
    data determines the orientation of a photograph in a file. An animation is represented by its first frame.

    Args:
        source: a PIL image, the path of a file, or an array or tensor: ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with
            one, three or four channels, integers from 0 to 255 or floats from 0 to 1.
        max_pixels: larger images are rejected before decoding.

    Raises:
        InputError: if the image is corrupt, too large, or not an image.

    Example:
        >>> read_image(np.zeros((2, 3))).size, read_image(np.full((3, 4, 5), 255)).getpixel((0, 0))
        ((3, 2), (255, 255, 255))
    """
    from PIL import Image as Pillow
    from PIL import ImageOps

    if is_pil(source):
        _check_pixels(source.size, max_pixels, "the image")
        return _rgb(source)
    if not isinstance(source, str | Path):
        return _rgb(_image_from_array(_as_array(source), max_pixels))
    path = expand_home(source)
    with _explain_read_errors(path, "an image"), Pillow.open(path) as opened:
        _check_pixels(opened.size, max_pixels, str(path))
        return _rgb(ImageOps.exif_transpose(opened))


def is_pil(item: Any) -> bool:
    """Return True if an input is a PIL image, without importing Pillow."""
    return hasattr(item, "tobytes") and hasattr(item, "mode") and hasattr(item, "getpixel")


def _check_pixels(size: tuple[int, int], max_pixels: int, name: str) -> None:
    width, height = size
    if width * height > max_pixels:
        raise InputError(
            f"`max_pixels` is {max_pixels}, but {name} has {width} x {height} = {width * height}. "
            "Make it smaller, or raise `max_pixels`."
        )
    if not width * height:
        raise InputError(f"`inputs` must be images of at least one pixel, but {name} has {width} x {height}.")


def _rgb(image: Image) -> Image:
    from PIL import Image as Pillow

    if image.mode == "RGB":
        return image.copy() if getattr(image, "fp", None) else image  # decode while the file is open
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Pillow.alpha_composite(Pillow.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    if image.mode.startswith("I") or image.mode == "F":
        pixels = np.asarray(image, dtype=np.float64)
        white = 65535 if pixels.max() > 255 else 1 if image.mode == "F" and pixels.max() <= 1 else 255
        image = Pillow.fromarray(np.round(np.clip(pixels / white, 0, 1) * 255).astype(np.uint8))
    return image.convert("RGB")


def _image_from_array(array: npt.NDArray[Any], max_pixels: int) -> Image:
    from PIL import Image as Pillow

    channels = (1, 3, 4)
    if array.ndim == 3 and array.shape[2] not in channels and array.shape[0] in channels:
        array = np.moveaxis(array, 0, 2)
    if array.ndim != 2 and (array.ndim != 3 or array.shape[2] not in channels):
        raise InputError(
            "An image as an array must have shape (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels, "
            f"but got {array.shape}."
        )
    _check_pixels((array.shape[1], array.shape[0]), max_pixels, "the array")
    has_integers = array.dtype.kind in "iu"
    low, high = float(array.min()), float(array.max())
    if not 0 <= low <= high <= (255 if has_integers else 1):  # also false for NaN
        raise InputError(
            f"An image as an array must hold {'integers from 0 to 255' if has_integers else 'floats from 0 to 1'}, but "
            f"its values range from {low:g} to {high:g}. Scale it, and undo any normalization: the model's processor "
            "normalizes."
        )
    pixels = array if has_integers else np.round(array.astype(np.float64) * 255)
    return Pillow.fromarray(np.ascontiguousarray(pixels.squeeze(2) if array.shape[2:] == (1,) else pixels, np.uint8))


class Waveform(TypedDict):
    """One channel of audio, float32, shape ``(T,)``, and its sampling rate, in the format of sentence-transformers."""

    array: npt.NDArray[np.float32]
    sampling_rate: int


def read_audio(source: Any, *, rate: int | None = None) -> Waveform:
    """Return one channel of audio as floats at the requested rate.

    Channels are averaged, integers are scaled to the range from -1 to 1, and SciPy's polyphase filter resamples other
    rates.

    Args:
        source: ``{"array": …, "sampling_rate": …}``, ``(array, rate)``, the path of a file, or a torchcodec decoder.
            SciPy reads WAV files, and the optional package soundfile all others. The longer axis of a
            two-dimensional array is time.
        rate: sampling rate of the model; ``None`` keeps the rate of the waveform.

    Raises:
        InputError: if the audio is empty, has no rate, is not finite, or is unreadable.

    Example:
        >>> waveform = read_audio((np.ones((2, 8000), dtype=np.int16), 8000), rate=16000)
        >>> waveform["array"].shape, waveform["sampling_rate"]
        ((16000,), 16000)
    """
    name = str(source) if isinstance(source, str | Path) else "A waveform"
    if isinstance(source, str | Path):
        samples_and_rate = _open_audio(expand_home(source))
        try:
            return read_audio(samples_and_rate, rate=rate)
        except InputError as reason:
            raise InputError(f"{source}: {reason}") from reason
    if isinstance(source, Mapping) and {"array", "sampling_rate"} <= set(source):
        source = source["array"], source["sampling_rate"]
    elif hasattr(source, "get_all_samples"):  # a torchcodec decoder, which datasets returns
        samples = source.get_all_samples()
        source = samples.data, samples.sample_rate
    if not isinstance(source, tuple) or len(source) != 2:
        raise InputError(
            "A waveform must come with its rate: (array, 16000) or {'array': array, 'sampling_rate': 16000}, "
            f"but got {short_repr(source)}."
        )
    samples = _one_channel(_as_array(source[0]), name)
    own_rate = source[1].item() if getattr(source[1], "shape", None) == () else source[1]  # datasets formats it
    if isinstance(own_rate, bool) or not isinstance(own_rate, int | np.integer) or own_rate < 1:
        raise InputError(f"{name} must have a positive number of samples per second, but got {own_rate!r}.")
    if rate is not None and rate != own_rate:
        from scipy.signal import resample_poly

        common = math.gcd(int(own_rate), rate)
        samples = np.asarray(resample_poly(samples, rate // common, own_rate // common), dtype=np.float32)
    return {"array": samples, "sampling_rate": rate or int(own_rate)}


def audio_lengths(waveforms: Sequence[Any], rate: int | None) -> list[int]:
    """Return the number of samples of each waveform at the model's rate; this reads files."""
    return [len(read_audio(waveform, rate=rate)["array"]) for waveform in waveforms]


def _open_audio(path: Path) -> tuple[npt.NDArray[Any], int]:
    with _explain_read_errors(path, "audio"):
        if path.suffix.lower() == ".wav":
            from scipy.io import wavfile

            return wavfile.read(path)[::-1]  # type: ignore[no-any-return]
        try:
            return importlib.import_module("soundfile").read(path, dtype="float32")  # type: ignore[no-any-return]
        except ImportError:
            raise InputError(
                f"{path} cannot be read: {path.suffix or 'a file without a suffix'} needs the soundfile package. "
                "Install it (pip install soundfile), or convert the file to WAV."
            ) from None


def _one_channel(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    if array.ndim == 2 and min(array.shape) <= _MAX_CHANNELS:
        array = array if array.shape[0] >= array.shape[1] else array.T
    elif array.ndim != 1:
        raise InputError(f"{name} must have shape (T,), (C, T) or (T, C), but got {array.shape}.")
    if not array.size or array.dtype.kind == "b":
        raise InputError(f"{name} must have at least one sample, a number.")
    samples = array.astype(np.float32)
    if array.dtype.kind == "u":  # 8-bit WAV: 128 is silence
        samples = samples / np.float32(128) - 1
    elif array.dtype.kind == "i":
        samples = samples / np.float32(-float(np.iinfo(array.dtype).min))
    samples = samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32)
    if not np.isfinite(samples).all():
        raise InputError(f"{name}: its samples must be finite, but hold NaN or infinity.")
    return samples


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
        kinds = (kind for kind, suffixes in _SUFFIXES.items() if str(item).lower().endswith(suffixes))
        by_suffix: Medium = next(kinds, "text")
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
    if not isinstance(axes, int) or axes < 1 or hasattr(item, "columns"):  # a data frame has two axes
        raise InputError(
            f"`inputs` must each be {_name_media(accepted)}, but got {short_repr(item)} ({type(item).__name__})."
        )
    return "image" if axes == 3 or (axes == 2 and "audio" not in accepted) else "audio"


def _is_waveform(item: Any) -> bool:
    """Return True if an input has the form of samples with a rate, valid or not."""
    if isinstance(item, Mapping):
        return "array" in item or "sampling_rate" in item
    return isinstance(item, tuple) and len(item) == 2 and not isinstance(item[0], str)


def _name_media(accepted: Sequence[str]) -> str:
    return " or ".join(_MEDIUM_NAMES[medium] for medium in accepted if medium in _MEDIUM_NAMES)


def check_taken(medium: Medium, accepted: Sequence[str], item: Any, *, model: str) -> None:
    """Raise an :class:`InputError` unless ``medium`` is one of the accepted media of ``model``."""
    if medium not in accepted:
        raise InputError(
            f"`inputs` must each be {_name_media(accepted)} for {model}, but got {_MEDIUM_NAMES[medium]}: "
            f"{short_repr(item)}. Choose a model that accepts it."
        )


def media_files(folder: Path | str, medium: Literal["image", "audio"], *, bad: str = "refuse") -> list[Path]:
    """Return the image or audio files in a folder and its subfolders, sorted by path.

    Args:
        folder: the folder.
        medium: ``"image"`` or ``"audio"``.
        bad: ``"refuse"`` raises an error for the first unreadable file; ``"skip"`` logs and omits unreadable files.
    """
    check_choice("medium", medium, _SUFFIXES)
    check_choice("bad", bad, ("refuse", "skip"))
    folder = expand_home(folder)
    if not folder.is_dir():
        raise OptionError(f"`folder` must be a folder of files, but there is none at {folder}.")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES[medium] and path.is_file())
    read = read_image if medium == "image" else read_audio
    readable = []
    for path in paths:
        try:
            read(path)
            readable.append(path)
        except InputError as error:
            if bad == "refuse":
                raise
            _log.warning("Skipped: %s", error)
    if not readable:
        raise OptionError(
            f"`folder` must hold at least one readable file ({', '.join(_SUFFIXES[medium])}), but "
            + (f"none of the {len(paths)} in {folder} can be read." if paths else f"{folder} has none.")
        )
    return readable
