"""Functions that reading images and reading audio share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midlayer_encoders.errors import MidlayerError, short_repr
from midlayer_encoders.files import check_regular_file, exists


class InputError(MidlayerError, ValueError):
    """An image or waveform is unreadable, or the model does not accept its medium.

    Attributes:
        item: the invalid input, if it was one of several.
    """

    def __init__(self, message: str, *, item: Any = None) -> None:
        super().__init__(message)
        self.item = item


def check_file(path: Path, kinds: str) -> None:
    """Raise an :class:`InputError` unless ``path`` is a regular file."""
    if not exists(path):
        raise InputError(
            f"`inputs` must be {kinds}, but there is no file {short_repr(str(path), 200)}. Texts need a text model."
        )
    check_regular_file(path, InputError)


def damaged(path: Path, kind: str, reason: Exception) -> InputError:
    """Return the error for an unreadable file."""
    return InputError(f"{path} cannot be read as {kind}: {reason}. It may be damaged: replace or remove it.")


def as_array(source: Any) -> npt.NDArray[Any]:
    """Return an array or tensor as a NumPy array."""
    if hasattr(source, "detach"):  # a tensor on any device
        source = source.detach().cpu()
        source = (source.float() if source.is_floating_point() else source).numpy()  # NumPy has no bfloat16
    if not isinstance(source, np.ndarray):
        raise InputError(
            "`inputs` must be PIL images, paths, arrays or tensors, or for audio (array, rate), "
            f"but got a {type(source).__name__}: {short_repr(source)}."
        )
    if source.dtype.kind not in "buif":
        raise InputError(f"`inputs` as arrays must hold real numbers, but got a dtype of {source.dtype}.")
    return source
