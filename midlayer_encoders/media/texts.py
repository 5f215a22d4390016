"""Texts from a file: a line each, or a field of JSONL; and the paper's way of preparing WikiText."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from midlayer_encoders.errors import OptionError, did_you_mean

__all__ = ["read_texts", "wikitext_paragraphs"]

_HEADING = re.compile(r"^\s*=.*=\s*$")


def read_texts(path: Path | str, *, field: str | None = None) -> list[str]:
    """Return the texts of a file, those that are not blank: its lines, or one field of each line of JSON.

    Args:
        path: a text file, or one of JSON objects, a line each.
        field: the field to take; needed, and taken as the sign, for JSON.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise OptionError(f"`texts` must be a file, but there is none at {path}.")
    try:
        lines = path.read_text(encoding="utf8").splitlines()
    except UnicodeDecodeError as reason:
        raise OptionError(f"`texts` must be a file in UTF-8, but {path} is not: {reason}.") from reason
    if field is None and path.suffix in (".jsonl", ".ndjson"):
        fields = list(json.loads(lines[0])) if lines and lines[0].startswith("{") else []
        raise OptionError(
            f"`field` must name the text in {path.name}. It has: {', '.join(fields) or 'no JSON objects'}."
        )
    rows = (
        lines if field is None else [_field(path, number, line, field) for number, line in enumerate(lines, 1) if line]
    )
    texts = [row for row in rows if row.strip()]
    if not texts:
        raise OptionError(f"`texts` must hold at least one text, but {path} has none.")
    return texts


def _field(path: Path, number: int, line: str, field: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as reason:
        raise OptionError(f"Line {number} of {path.name} is not JSON: {reason}.") from reason
    if not isinstance(row, dict) or field not in row:
        fields = list(row) if isinstance(row, dict) else []
        raise OptionError(
            f"`field` must be in every line of {path.name}, but line {number} has {', '.join(fields) or 'no fields'}."
            + did_you_mean(field, fields)
        )
    text = row[field]
    if not isinstance(text, str):
        raise OptionError(f"`field` must hold text, but line {number} of {path.name} has {text!r}.")
    return text


def wikitext_paragraphs(lines: Sequence[str], count_tokens: Callable[[str], int], *, least: int = 30) -> list[str]:
    """Return the paragraphs of WikiText, without headings (`` = Title = ``) and those of fewer than ``least`` tokens.

    Example:
        >>> wikitext_paragraphs([" = Title = ", "too short", "one two three four"], lambda t: len(t.split()), least=4)
        ['one two three four']
    """
    paragraphs = [line.strip() for line in lines if line.strip() and not _HEADING.match(line)]
    return [paragraph for paragraph in paragraphs if count_tokens(paragraph) >= least]
