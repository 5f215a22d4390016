"""Validation of arguments: each function returns the checked value or raises an :class:`OptionError`."""

import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import fields
from numbers import Real
from typing import Any, TypeVar

from midlayer_encoders.errors import OptionError, did_you_mean, short_repr

_T = TypeVar("_T")


def check_choice(argument: str, value: object, choices: Iterable[str]) -> str:
    """Return a string that is one of ``choices``."""
    names = list(choices)
    if not isinstance(value, str) or value not in names:
        raise OptionError(
            f"`{argument}` must be one of {', '.join(map(repr, names))}, but got {short_repr(value)}."
            + (did_you_mean(value, names) if isinstance(value, str) else "")
        )
    return str(value)


def check_count(argument: str, value: object, unit: str = "", *, minimum: int = 1, maximum: int = 2**63 - 1) -> int:
    """Return an integer from ``minimum`` to ``maximum`` as an ``int``; NumPy integers pass, bools do not.

    Example:
        >>> check_count("views", 0)
        Traceback (most recent call last):
        ...
        midlayer_encoders.errors.OptionError: `views` must be a whole number, 1 or more, but got 0.
    """
    with suppress(TypeError, ValueError):  # ValueError: a tensor with several elements
        if not isinstance(value, bool) and minimum <= operator.index(value) <= maximum:  # type: ignore[arg-type]
            return operator.index(value)  # type: ignore[arg-type]
    bounds = f", {minimum} or more" if maximum == 2**63 - 1 else f" from {minimum} to {maximum}"
    requirement = f"a positive number of {unit}" if unit else f"a whole number{bounds}"
    raise OptionError(f"`{argument}` must be {requirement}, but got {short_repr(value)}.")


def layer_number(word: str) -> int | float | None:
    """Return the layer that a word names, ``None`` for another word and for a fraction outside (0, 1].

    Example:
        >>> layer_number("17"), layer_number("-1"), layer_number("0.7"), layer_number("-0.2"), layer_number("last")
        (17, -1, 0.7, None, None)
    """
    if re.fullmatch(r"\s*-?[0-9]{1,9}\s*", word):
        return int(word)
    return float(word) if re.fullmatch(r"\s*[0-9]*\.[0-9]+\s*", word) and 0 < float(word) <= 1 else None


def check_seed(value: object) -> int:
    """Return a seed that every random generator accepts: an integer from 0 to 2**32 - 1."""
    return check_count("seed", value, minimum=0, maximum=2**32 - 1)


def check_number(argument: str, value: object, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """Return a finite number from ``minimum`` to ``maximum`` as a ``float``."""
    with suppress(OverflowError):
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan  # type: ignore[unreachable]
        if math.isfinite(number) and minimum <= number <= maximum:
            return number
    bounds = f"{minimum:g} or more" if maximum == math.inf else f"from {minimum:g} to {maximum:g}"
    raise OptionError(f"`{argument}` must be a finite number, {bounds}, but got {short_repr(value)}.")


def check_flag(argument: str, value: object) -> bool:
    """Return a bool; strings and numbers are rejected because ``"no"`` would count as true."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # NumPy bools, without importing NumPy
        return bool(value)
    raise OptionError(f"`{argument}` must be True or False, but got {short_repr(value)}.")


def lone_surrogate(text: str) -> str | None:
    r"""Return the first unpaired surrogate of a text as an escape sequence, or ``None`` if the text is valid.

    Example:
        >>> lone_surrogate("cut " + chr(0xD83D)) == r"\ud83d", lone_surrogate("whole " + chr(0x1F642))
        (True, None)
    """
    try:
        text.encode("utf8")
    except UnicodeEncodeError as error:
        return ascii(text[error.start])[1:-1]
    return None


def check_text(argument: str, value: object) -> str:
    """Return a string that UTF-8 can encode."""
    if not isinstance(value, str):
        raise OptionError(f"`{argument}` must be a string, but got {short_repr(value)} ({type(value).__name__}).")
    if (surrogate := lone_surrogate(value)) is not None:
        raise OptionError(
            f"`{argument}` must be valid text, but {short_repr(value)} contains the unpaired surrogate {surrogate}, "
            "which is half of an emoji. Remove it: text.encode('utf8', 'ignore').decode()."
        )
    return value


def _text_column(argument: str, table: Any) -> Any:
    """Return the column ``text`` of a data frame or a dataset, or its only column; another value unchanged."""
    names = getattr(table, "column_names", None) or getattr(table, "columns", None)
    if names is None or isinstance(table, Mapping):
        return table
    column = next((name for name in names if len(names) == 1 or str(name).lower() == "text"), None)
    if column is None:
        listed = ", ".join(map(str, names))
        raise OptionError(f"`{argument}` must be texts, but got a table with {listed}: pass the column of the texts.")
    values = table[column]
    return values.to_pylist() if hasattr(values, "to_pylist") else values


def check_list(argument: str, values: object, items: str = "texts", *, minimum: int = 1) -> list[Any]:
    """Return the values of any sequence as a list, of a table its texts; a single string is rejected.

    Example:
        >>> check_list("texts", "a text")
        Traceback (most recent call last):
        ...
        midlayer_encoders.errors.OptionError: `texts` must be a list of texts, but got one: 'a text'. Write ['a text'].
    """
    if isinstance(values, str):
        text = short_repr(values)
        is_file = os.path.isfile(values)  # noqa: PTH113, a text may be too long for a path
        cure = f"open({values!r}).read().splitlines()" if is_file else f"[{text}]"
        raise OptionError(f"`{argument}` must be a list of {items}, but got one: {text}. Write {cure}.")
    values = _text_column(argument, values)
    is_scalar = getattr(values, "ndim", 1) == 0  # an array or tensor
    if not isinstance(values, Iterable) or isinstance(values, bytes | Mapping | Set) or is_scalar:
        raise OptionError(
            f"`{argument}` must be a list of {items}, but got {short_repr(values)} ({type(values).__name__})."
        )
    result = list(values)
    if len(result) < minimum:
        requirement = f"{minimum} {items} or more" if minimum > 1 else f"at least one {items.removesuffix('s')}"
        raise OptionError(f"`{argument}` must hold {requirement}, but got {len(result) or 'none'}.")
    return result


def check_texts(argument: str, values: object, *, minimum: int = 1) -> list[str]:
    """Return texts as a list; the error names the first item that is not valid text."""
    texts = check_list(argument, values, minimum=minimum)
    return [check_text(f"{argument}[{index}]", text) for index, text in enumerate(texts)]


def check_progress(value: object) -> None:
    """Raise an :class:`OptionError` unless a progress callback is callable or ``None``."""
    if value is not None and not callable(value):
        raise OptionError(f"`progress` must be a function (stage, done, total) or None, but got {short_repr(value)}.")


def check_path(argument: str, value: object) -> None:
    """Raise an :class:`OptionError` unless a value is a file path, a folder path or ``None``."""
    if value is not None:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if "\0" in check_text(argument, text) or not text:
            raise OptionError(f"`{argument}` must be a path, but got {short_repr(value)}.")


def check_effect(function: Callable[..., Any], condition: str, **arguments: object) -> None:
    """Raise an :class:`OptionError` if an argument that has no effect differs from the function's default.

    Args:
        function: the function that declares the defaults.
        condition: when the arguments have no effect, for example ``"with kind='linear'"``.
        arguments: the arguments by name, with the values that the function received.
    """
    parameters = inspect.signature(function).parameters
    for name, value in arguments.items():
        if not _equal(value, parameters[name].default):
            raise OptionError(f"`{name}` has no effect {condition}, but got {short_repr(value)}.")


def _equal(value: object, default: object) -> bool:
    """Return whether two values are the same; an array equals nothing else."""
    return value is default or (type(value) is type(default) and value == default)


def check_matches_encoder(argument: str, value: _T | None, setting: _T) -> _T:
    """Return the encoder's setting, or raise an :class:`OptionError` if the argument differs from it."""
    if value is not None and not _equal(value, setting):
        raise OptionError(
            f"`{argument}` must be the encoder's, {setting!r}, but got {short_repr(value)}. "
            f"Leave it out, or create the encoder with {argument}={short_repr(value)}."
        )
    return setting


def check_fields(settings: Any, **checks: Callable[[str, Any], Any]) -> None:
    """Replace the fields of a frozen dataclass by their checked values; ``None`` as a default needs no check.

    Args:
        settings: the dataclass.
        checks: for each field, a function of its name and value that returns the value in its canonical type.
    """
    defaults = {field.name: field.default for field in fields(settings)}
    for name, check in checks.items():
        value = getattr(settings, name)
        if value is not None or defaults[name] is not None:
            object.__setattr__(settings, name, check(name, value))
