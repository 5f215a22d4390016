"""Files of text as people have them: checked before they are opened, decoded, split at line ends, read as JSON.

Whatever is wrong with a file is raised as the error class of the room that reads it, with file, line and cure.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midlayer_encoders.errors import MidlayerError, short_repr
from midlayer_encoders.validation import lone_surrogate

__all__ = ["at_home", "check_ordinary", "exists", "json_object", "json_rows", "read_lines", "read_whole"]

_COMPRESSED = {
    rb"\x1f\x8b": ("gzip", "gunzip"),
    rb"BZh[1-9]1AY&SY": ("bzip2", "bunzip2"),
    rb"\xfd7zXZ\0": ("xz", "unxz"),
    rb"\x28\xb5\x2f\xfd": ("Zstandard", "unzstd"),
    rb"PK\x03\x04": ("zip", "unzip"),
}
"""How compressed files begin, what they are, and what undoes it: a small one may hold more than the memory does."""

_MARKS = (b"\xff\xfe", b"\xfe\xff")  # with which UTF-16 begins
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def at_home(path: Path | str) -> Path:
    """Return a path whose ``~`` is someone's home, where there is such a one."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):  # nobody of that name, or none that a name can have
        return Path(path)


def exists(path: Path) -> bool:
    """Return whether there is something at a path; nothing is at one that no file system takes."""
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a null character
        return False


def check_ordinary(path: Path, error: type[MidlayerError]) -> None:
    """Raise ``error`` unless there is an ordinary file at ``path`` that may be read; a FIFO would never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as reason:
        raise error(f"There is no file {short_repr(str(path), 200)} to read: {_reason(reason)}.") from reason
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")
        raise error(f"{path} must be an ordinary file, but is {kind}. Copy what it holds to a file.")
    if not os.access(path, os.R_OK):
        raise error(f"{path} must be a file that you may read, but you may not: change its permissions (chmod +r).")


def read_whole(path: Path, error: type[MidlayerError]) -> str:
    """Return a file of text in UTF-8, without the mark that some editors put first."""
    check_ordinary(path, error)
    try:
        content = path.read_bytes()
    except OSError as reason:
        raise error(f"{path} cannot be read: {_reason(reason)}.") from reason
    for start, (kind, cure) in _COMPRESSED.items():
        if re.match(start, content):
            raise error(f"{path} must be plain text, but is compressed ({kind}). Decompress it first: {cure}.")
    if content.startswith(_MARKS):
        raise error(f"{path}, line 1: must be UTF-8, but is UTF-16. {_converted('utf-16', path)}")
    if b"\0" in content:
        line = 1 + content[: content.index(b"\0")].count(b"\n")
        raise error(
            f"{path}, line {line}: must be UTF-8, but has a null character: it may be UTF-16, or no text at all. "
            f"{_converted('utf-16le', path)}"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line = 1 + content[: reason.start].count(b"\n")
        raise error(
            f"{path}, line {line}: must be UTF-8, but the byte 0x{content[reason.start]:02x} is not: it may be Latin-1 "
            f"(Windows-1252). {_converted('windows-1252', path)}"
        ) from reason


def read_lines(path: Path, error: type[MidlayerError]) -> list[str]:
    """Return the lines of a file of text, as an editor counts them: no other character than a line end ends one."""
    # Not `splitlines`: it also splits at U+2028 and a few controls, which JSON and plain texts may hold.
    lines = read_whole(path, error).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def json_rows(path: Path, error: type[MidlayerError]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the object of each line that is not blank, with the number of the line."""
    for number, line in enumerate(read_lines(path, error), start=1):
        if line.strip():
            yield number, json_object(line, f"{path}, line {number}", error)


def json_object(text: str, where: str, error: type[MidlayerError]) -> dict[str, Any]:
    """Return one JSON object, or raise ``error`` with what is wrong and ``where`` it is."""
    try:
        row = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise error(f"{where}: must be one JSON object, but is nested too deeply. Flatten it.") from None
    except json.JSONDecodeError as reason:
        raise error(
            f"{where}: must be one JSON object, but cannot be read: {reason.msg}, at character {reason.pos + 1}."
        ) from reason
    except ValueError as reason:  # of an integer of thousands of digits, of a repeated name
        words = "a number has thousands of digits: put it in quotes" if "digits" in str(reason) else reason
        raise error(f"{where}: must be one JSON object, but cannot be read: {words}.") from reason
    if not isinstance(row, dict):
        raise error(f"{where}: must be one JSON object, but got {short_repr(text.strip(), 40)}.")
    if "\\u" in text and (surrogate := lone_surrogate(json.dumps(row, ensure_ascii=False))) is not None:
        raise error(
            f"{where}: must be valid text, but contains the unpaired surrogate {surrogate}, which is half of an emoji. "
            "Remove it."
        )
    return row


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has two fields {twice!r}, of which one must go")
    return row


def _converted(encoding: str, path: Path) -> str:
    return f"Convert it: iconv -f {encoding} -t utf-8 {path.name} > new{path.suffix}"


def _reason(reason: Exception) -> str:
    return getattr(reason, "strerror", None) or str(reason)
