"""Reading of images as RGB."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from midlayer_encoders._types import MAX_PIXELS
from midlayer_encoders.files import expand_home
from midlayer_encoders.media._arrays import InputError, as_array, check_file, damaged

if TYPE_CHECKING:
    from PIL.Image import Image


def read_image(source: Any, *, max_pixels: int = MAX_PIXELS) -> Image:
    """Return an image in RGB.

    Grayscale images, palettes and 16-bit images are converted, and transparent images are composed on white. EXIF data
    determines the orientation of a photograph in a file. An animation is represented by its first frame.

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
    if is_pil(source):
        _check_pixels(source.size, max_pixels, "the image")
        return _rgb(source)
    if isinstance(source, str | Path):
        return _open_image(expand_home(source), max_pixels)
    return _rgb(_image_from_array(as_array(source), max_pixels))


def is_pil(item: Any) -> bool:
    """Return True if an input is a PIL image, without importing Pillow."""
    return hasattr(item, "tobytes") and hasattr(item, "mode") and hasattr(item, "getpixel")


def _open_image(path: Path, max_pixels: int) -> Image:
    from PIL import Image as Pillow
    from PIL import ImageOps

    check_file(path, "images or paths of images")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images, which `max_pixels` limits, and damaged EXIF data
            with Pillow.open(path) as opened:
                _check_pixels(opened.size, max_pixels, str(path))
                return _rgb(ImageOps.exif_transpose(opened))
    except InputError:
        raise
    except Pillow.DecompressionBombError as error:
        raise InputError(
            f"{path} must have at most {max_pixels} pixels, but Pillow rejected it: {error} "
            "Make it smaller, or raise `PIL.Image.MAX_IMAGE_PIXELS` as well as `max_pixels`."
        ) from error
    except Exception as error:  # Pillow's readers raise many types of errors for damaged files
        raise damaged(path, "an image", error) from error


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
        deep = np.asarray(image, dtype=np.float64)
        largest = 65535.0 if deep.max() > 255 else 255.0
        scaled = np.clip(deep / largest, 0, 1) if image.mode != "F" or deep.max() > 1 else np.clip(deep, 0, 1)
        image = Pillow.fromarray(np.round(scaled * 255).astype(np.uint8))
    return image.convert("RGB")


def _image_from_array(array: npt.NDArray[Any], max_pixels: int) -> Image:
    from PIL import Image as Pillow

    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise InputError(
            "An image as an array must have shape (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels, "
            f"but got {array.shape}."
        )
    _check_pixels((array.shape[1], array.shape[0]), max_pixels, "the array")
    array = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return Pillow.fromarray(np.ascontiguousarray(_bytes(array)))


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    whole = array.dtype.kind in "iu"
    low, high, most = float(array.min()), float(array.max()), 255 if whole else 1
    if not (math.isfinite(low) and math.isfinite(high)) or low < 0 or high > most:
        raise InputError(
            f"An image as an array must hold {'integers from 0 to 255' if whole else 'floats from 0 to 1'}, but its "
            f"values go from {low:g} to {high:g}. Scale it, and undo any normalization: the model's processor does it."
        )
    return np.asarray(array if whole else np.round(array.astype(np.float64) * 255)).astype(np.uint8)
