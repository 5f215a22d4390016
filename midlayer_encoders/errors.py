"""What this package raises: every message names the argument, what it must be, what it was, and the cure."""

from __future__ import annotations

import inspect
import math
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from difflib import get_close_matches
from numbers import Real
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
    "check_count",
    "check_effect",
    "check_flag",
    "check_list",
    "check_number",
    "check_path",
    "check_progress",
    "check_seed",
    "check_text",
    "check_texts",
    "did_you_mean",
    "error_words",
    "half_character",
    "old_names",
    "shown",
    "warn_deprecated",
    "without_tokens",
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


def shown(value: object, most: int = 60) -> str:
    """Return a value in few words, for an error, whatever it is.

    Example:
        >>> shown([1, 2]), shown(10**5000), shown("a" * 99, most=9)
        ('[1, 2]', 'an int', "'aaaaaaa…")
    """
    if getattr(value, "shape", ()):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    try:
        text = repr(value)
    except Exception:  # the repr of another's class, or of an integer of thousands of digits
        return f"an {type(value).__name__}" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"


def without_tokens(text: str) -> str:
    """Return a text without the hub's tokens: clients put a request's headers into some of their errors.

    Example:
        >>> without_tokens("Illegal header value b'Bearer hf_abcdefghijklmnop'")
        "Illegal header value b'Bearer hf_…'"
    """
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if len(secret := os.environ.get(name, "").strip()) > 3:
            text = text.replace(secret, "hf_…")
    return re.sub(r"\bhf_[A-Za-z0-9]{8,}", "hf_…", text)


def error_words(error: BaseException) -> str:
    """Return what an error of another library is called and says, as it may be printed and kept.

    Example:
        >>> error_words(KeyError("text"))
        "KeyError: 'text'"
    """
    return without_tokens(f"{type(error).__name__}: {error}")


# --- checks of arguments, each where a value comes in ---------------------------------------------------------------


def check_choice(argument: str, value: object, known: Iterable[str]) -> None:
    """Raise an :class:`OptionError` unless ``value`` is one of the ``known`` words."""
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise OptionError(
            f"`{argument}` must be one of {', '.join(map(repr, words))}, but got {shown(value)}."
            + (did_you_mean(value, words) if isinstance(value, str) else "")
        )


def check_count(argument: str, value: object, what: str = "", *, least: int = 1) -> int:
    """Return a whole number of ``least`` or more as an ``int``; NumPy's are taken, bools are not.

    Example:
        >>> check_count("views", 0)
        Traceback (most recent call last):
        ...
        midlayer_encoders.errors.OptionError: `views` must be a whole number, 1 or more, but got 0.
    """
    number = _whole(value)
    if number is None or not least <= number < 2**63:
        kind = f"a positive number of {what}" if what else f"a whole number, {least} or more"
        raise OptionError(f"`{argument}` must be {kind}, but got {shown(value)}.")
    return number


def check_seed(value: object, argument: str = "seed") -> int:
    """Return a seed that every generator takes: a whole number from 0 to 2**32 - 1."""
    number = _whole(value)
    if number is None or not 0 <= number < 2**32:
        raise OptionError(f"`{argument}` must be a whole number from 0 to 2**32 - 1, but got {shown(value)}.")
    return number


def check_number(argument: str, value: object, *, least: float = 0.0, most: float = math.inf) -> float:
    """Return a finite number between ``least`` and ``most`` as a ``float``."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if real else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not least <= number <= most:
        bounds = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
        raise OptionError(f"`{argument}` must be a finite number, {bounds}, but got {shown(value)}.")
    return number


def check_flag(argument: str, value: object) -> bool:
    """Return True or False; a word or a number is refused, since ``"no"`` would count as true."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # NumPy's, without importing it
        return bool(value)
    raise OptionError(f"`{argument}` must be True or False, but got {shown(value)}.")


def half_character(text: str) -> str | None:
    r"""Return the first half of a surrogate pair without its other half, as it is written; ``None`` for sound texts.

    Example:
        >>> half_character("cut " + chr(0xD83D)) == r"\ud83d", half_character("whole " + chr(0x1F642))
        (True, None)
    """
    try:
        text.encode("utf8")
    except UnicodeEncodeError as reason:
        return ascii(text[reason.start])[1:-1]
    return None


def check_text(argument: str, value: object) -> str:
    """Return a string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise OptionError(f"`{argument}` must be a string, but got {shown(value)} ({type(value).__name__}).")
    if (half := half_character(value)) is not None:
        raise OptionError(
            f"`{argument}` must be text, but {shown(value)} holds half a character, {half}: an emoji was cut in two. "
            "Cut it elsewhere, or drop the half: text.encode('utf8', 'ignore').decode()."
        )
    return value


def check_list(argument: str, values: object, what: str = "texts", *, least: int = 1) -> list[Any]:
    """Return several values as a list: of any kind of sequence, but not of one string, which is a sequence of letters.

    Example:
        >>> check_list("texts", "a text")
        Traceback (most recent call last):
        ...
        midlayer_encoders.errors.OptionError: `texts` must be a list of texts, but got one: 'a text'. Write ['a text'].
    """
    if isinstance(values, str):
        one = shown(values)
        raise OptionError(f"`{argument}` must be a list of {what}, but got one: {one}. Write [{one}].")
    scalar = getattr(values, "ndim", 1) == 0  # of NumPy or torch
    if not isinstance(values, Iterable) or isinstance(values, bytes | Mapping | Set) or scalar:
        raise OptionError(f"`{argument}` must be a list of {what}, but got {shown(values)} ({type(values).__name__}).")
    found = list(values)
    if len(found) < least:
        some = f"{least} {what} or more" if least > 1 else f"at least one {what.removesuffix('s')}"
        raise OptionError(f"`{argument}` must hold {some}, but got {len(found) or 'none'}.")
    return found


def check_texts(argument: str, values: object, *, least: int = 1) -> list[str]:
    """Return texts as a list, or raise which of them is none."""
    texts = check_list(argument, values, least=least)
    return [check_text(f"{argument}[{place}]", text) for place, text in enumerate(texts)]


def check_progress(value: object) -> None:
    """Raise an :class:`OptionError` unless a progress callback can be called, or is none."""
    if value is not None and not callable(value):
        raise OptionError(f"`progress` must be a function of (stage, done, total) or None, but got {shown(value)}.")


def check_path(argument: str, value: object) -> None:
    """Raise an :class:`OptionError` unless a value is the path of a file or folder, or none."""
    if value is not None:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if "\0" in check_text(argument, text) or not text:
            raise OptionError(f"`{argument}` must be a path, but got {shown(value)}.")


def check_effect(function: Callable[..., Any], why: str, **given: object) -> None:
    """Raise an :class:`OptionError` where an argument differs from the function's default but would have no effect.

    Args:
        function: whose arguments they are.
        why: end of the sentence, as ``"with kind='knn', which trains nothing"``.
        given: the arguments by name, as the function got them.
    """
    known = inspect.signature(function).parameters
    for name, value in given.items():
        default = known[name].default
        if value is not default and not (type(value) is type(default) and value == default):
            raise OptionError(f"`{name}` must be left out {why}, but got {shown(value)}.")


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # the latter from a tensor of several
        return None


# --- what was renamed -----------------------------------------------------------------------------------------------


def warn_deprecated(message: str) -> None:
    """Warn of something deprecated at the caller's own line, the first outside this package.

    Python shows a ``DeprecationWarning`` by default only where it is raised for a line of ``__main__``.
    """
    package, level, frame = __name__.partition(".")[0], 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DeprecationWarning, stacklevel=level)


def old_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module that finds what was renamed, with a ``DeprecationWarning``.

    Args:
        module: the module's ``__name__``.
        renamed: the new name of each old one; the old ones are removed in 0.3.
    """

    def find(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_deprecated(f"`{name}` is now `{renamed[name]}`; the old name is removed in 0.3.")
        return getattr(sys.modules[module], renamed[name])

    return find
