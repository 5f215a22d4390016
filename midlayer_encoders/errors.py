"""What this package raises: every message names the argument, what it must be, what it was, and the cure."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

__all__ = [
    "AnatomyError",
    "CutError",
    "DeviceError",
    "DiskFullError",
    "FolderError",
    "LayerIndexError",
    "MidlayerError",
    "ModelNotFoundError",
    "NotFiniteError",
    "OptionError",
    "check_choice",
    "did_you_mean",
    "old_names",
]


class MidlayerError(Exception):
    """Any error that this package raises on purpose."""


class OptionError(MidlayerError, ValueError):
    """An argument has a value that it cannot have."""


class LayerIndexError(OptionError):
    """A layer that the model does not have."""


class AnatomyError(MidlayerError):
    """A model in which the blocks could not be found, or not for certain."""


class CutError(MidlayerError):
    """A model that cannot be cut without changing the layers that are kept."""


class ModelNotFoundError(MidlayerError, OSError):
    """A model, revision or file that is not there, or cannot be reached."""


class DeviceError(MidlayerError, RuntimeError):
    """A device that this machine does not have, or torch does not know."""


class FolderError(MidlayerError, OSError):
    """A folder that cannot be written to: a file or a broken link is in its place, or another run is using it."""


class DiskFullError(MidlayerError, OSError):
    """No room left on the disk; what was there before stays readable."""


class NotFiniteError(MidlayerError, ArithmeticError):
    """NaN or infinity where a number was needed."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the known word nearest to a wrong one, or an empty string.

    Example:
        >>> did_you_mean("maen", ["mean", "last"]), did_you_mean("sts13", ["STS13"])
        (" Did you mean 'mean'?", " Did you mean 'STS13'?")
    """
    written = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), written, n=1)
    return f" Did you mean {written[near[0]]!r}?" if near else ""


def check_choice(argument: str, value: object, known: Iterable[str]) -> None:
    """Raise an :class:`OptionError` unless ``value`` is one of the ``known`` words."""
    words = list(known)
    if value not in words:
        raise OptionError(
            f"`{argument}` must be one of {', '.join(map(repr, words))}, but got {value!r}."
            + (did_you_mean(value, words) if isinstance(value, str) else "")
        )


def old_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module that finds what was renamed, with a ``DeprecationWarning``.

    Args:
        module: the module's ``__name__``.
        renamed: the new name of each old one; the old ones are removed in 0.3.
    """

    def find(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"`{name}` is now `{renamed[name]}`; the old name is removed in 0.3.", DeprecationWarning, stacklevel=2
        )
        return getattr(sys.modules[module], renamed[name])

    return find
