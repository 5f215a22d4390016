"""Exceptions of this package, and functions that word error messages."""

import os
import pickle
import re
from collections.abc import Iterable
from difflib import get_close_matches


class MidlayerError(Exception):
    """Base class of all errors that this package raises."""

    def __str__(self) -> str:
        return printable(super().__str__())


class OptionError(MidlayerError, ValueError):
    """An argument has an invalid value."""


class LayerIndexError(OptionError):
    """The model does not have the requested layer."""


class AnatomyError(MidlayerError):
    """The blocks of a model could not be identified."""


class CutError(MidlayerError):
    """A model cannot be cut without changing its remaining layers."""


class ModelNotFoundError(MidlayerError, OSError):
    """A model, revision or file does not exist or cannot be reached."""


class DeviceError(MidlayerError, RuntimeError):
    """A device is missing on this machine or unknown to torch."""


class FolderError(MidlayerError, OSError):
    """A folder is not writable: its path is a file or a broken link, or another run is using it."""


class DiskFullError(MidlayerError, OSError):
    """The disk is full. Existing files remain readable."""


#: Errors that would also stop the next task.
FATAL = DiskFullError, FolderError


class NotFiniteError(MidlayerError, ArithmeticError):
    """A value is NaN or infinite."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the choice closest to a misspelled word, or an empty string.

    Without a very close one, choices that contain the word come first.

    Example:
        >>> did_you_mean("maen", ["mean", "last"]), did_you_mean("sts13", ["STS13"])
        (" Did you mean 'mean'?", " Did you mean 'STS13'?")
        >>> did_you_mean("entropy", ["anisotropy", "prompt_entropy", "dataset_entropy"])
        " Did you mean 'prompt_entropy' or 'dataset_entropy'?"
        >>> did_you_mean("entropyy", ["anisotropy", "prompt_entropy", "matrix_entropy"])
        " Did you mean 'prompt_entropy' or 'matrix_entropy'?"
    """
    by_lowercase = {name.lower(): name for name in choices}
    word = word.lower()
    containing = [name for name in by_lowercase if len(word) > 2 and _holds(name, word)][:3]
    very_close, close = (get_close_matches(word, by_lowercase, n=1, cutoff=cutoff) for cutoff in (0.85, 0.6))
    matches = very_close or containing or close
    *others, last = [repr(by_lowercase[name]) for name in matches] or [""]
    return f" Did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


def _holds(name: str, word: str) -> bool:
    """Return True if a name contains a word, or one of its parts is very close to it."""
    return word in name or bool(get_close_matches(word, re.split("[_-]", name), n=1, cutoff=0.85))


def pluralize(count: int, noun: str, plural: str = "") -> str:
    """Return a number of things in words.

    Example:
        >>> pluralize(1, "text"), pluralize(1200, "text"), pluralize(2, "pass", "passes")
        ('1 text', '1,200 texts', '2 passes')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def short_repr(value: object, max_length: int = 60) -> str:
    """Return a short representation of any value for an error message.

    Example:
        >>> short_repr([1, 2]), short_repr(10**5000), short_repr("a" * 99, max_length=9)
        ('[1, 2]', 'an int', "'aaaaaaa…")
    """
    if getattr(value, "shape", ()):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    try:
        text = repr(value)
    except Exception:  # a third-party `__repr__`, or an integer of thousands of digits
        return f"an {type(value).__name__}" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


def printable(text: str) -> str:
    r"""Return a text in one line with its control characters escaped: files choose parts of error messages.

    Example:
        >>> printable("a type\nwith \x1b[31mcolor")
        'a type with \\x1b[31mcolor'
    """
    line = " ".join(map(str.strip, text.splitlines()))
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def redact_tokens(text: str) -> str:
    """Return a text without Hugging Face tokens: HTTP clients put request headers into some error messages.

    Example:
        >>> redact_tokens("Illegal header value b'Bearer hf_abcdefghijklmnop'")
        "Illegal header value b'Bearer hf_…'"
    """
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if len(secret := os.environ.get(name, "").strip()) > 3:
            text = text.replace(secret, "hf_…")
    return re.sub(r"\bhf_[A-Za-z0-9]{8,}", "hf_…", text)


def error_summary(error: BaseException) -> str:
    """Return the type and message of an error without secrets and control characters, safe to print and to save.

    torch recommends to load an unsafe pickle nevertheless; its errors are replaced by their cause.

    Example:
        >>> error_summary(KeyError("text"))
        "KeyError: 'text'"
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, pickle.UnpicklingError):
        names = re.findall(r"GLOBAL (\S+)", text)
        problem = f"refers to {names[0]}, which could run code" if names else "is damaged"
        text = f"a pickled file of weights {problem}. It is not read; save the weights as safetensors"
    return printable(redact_tokens(text))
