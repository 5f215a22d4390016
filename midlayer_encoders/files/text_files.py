"""Read the text and JSON files that users provide.

Each function raises the error class that its caller passes, with the file, the line and the cure.
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

_COMPRESSED = {
    rb"\x1f\x8b": ("gzip", "gunzip"),
    rb"BZh[1-9]1AY&SY": ("bzip2", "bunzip2"),
    rb"\xfd7zXZ\0": ("xz", "unxz"),
    rb"\x28\xb5\x2f\xfd": ("Zstandard", "unzstd"),
    rb"PK\x03\x04": ("zip", "unzip"),
}
"""First bytes of compressed files, their format and the command that decompresses them."""

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def expand_home(path: Path | str) -> Path:
    """Return a path with ``~`` expanded, or unchanged if that user does not exist."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def exists(path: Path) -> bool:
    """Return True if the path exists; an invalid path does not."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def check_regular_file(path: Path, error: type[MidlayerError]) -> None:
    """Raise ``error`` unless ``path`` is a readable regular file; reading a FIFO would never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as reason:
        raise error(f"There is no file {short_repr(str(path), 200)} to read: {_reason(reason)}.") from reason
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")
        raise error(f"{path} must be a regular file, but is {kind}. Copy its content to a file.")
    if not os.access(path, os.R_OK):
        raise error(f"{path} must be readable, but you lack the permission: chmod +r.")


def read_text_file(path: Path, error: type[MidlayerError]) -> str:
    """Return the content of a UTF-8 file, without a byte order mark."""
    check_regular_file(path, error)
    try:
        content = path.read_bytes()
    except OSError as reason:
        raise error(f"{path} cannot be read: {_reason(reason)}.") from reason
    for start, (kind, cure) in _COMPRESSED.items():
        if re.match(start, content):
            raise error(f"{path} must be plain text, but is compressed ({kind}). Decompress it first: {cure}.")
    if content.startswith(_UTF16_MARKS):
        raise error(f"{path}, line 1: must be UTF-8, but is UTF-16. {_converted('utf-16', path)}")
    if b"\0" in content:
        line = 1 + content[: content.index(b"\0")].count(b"\n")
        raise error(
            f"{path}, line {line}: must be UTF-8, but has a null character: it may be UTF-16, or not text at all. "
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
    """Return the lines of a text file, split at line ends only."""
    # `splitlines` would also split at U+2028 and control characters, which texts may contain.
    lines = read_text_file(path, error).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def read_json_lines(path: Path, error: type[MidlayerError]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each line that is not blank."""
    for number, line in enumerate(read_lines(path, error), start=1):
        if line.strip():
            yield number, parse_json_object(line, f"{path}, line {number}", error)


def parse_json_object(text: str, where: str, error: type[MidlayerError]) -> dict[str, Any]:
    """Return a JSON object, or raise ``error`` with the problem and ``where`` it is."""
    try:
        row = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise error(f"{where}: must be one JSON object, but is nested too deeply. Flatten it.") from None
    except json.JSONDecodeError as reason:
        raise error(
            f"{where}: must be one JSON object, but cannot be read: {reason.msg}, at character {reason.pos + 1}."
        ) from reason
    except ValueError as reason:  # a huge integer, or a repeated name
        problem = "a number has thousands of digits: put it in quotes" if "digits" in str(reason) else reason
        raise error(f"{where}: must be one JSON object, but cannot be read: {problem}.") from reason
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
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {repeated!r} appears twice, remove one")
    return row


def _converted(encoding: str, path: Path) -> str:
    return f"Convert it: iconv -f {encoding} -t utf-8 {path.name} > new{path.suffix}"


def _reason(reason: Exception) -> str:
    return getattr(reason, "strerror", None) or str(reason)
