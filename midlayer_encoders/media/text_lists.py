"""Read lists of texts from text or JSONL files, and prepare WikiText as in the paper."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from midlayer_encoders.errors import OptionError, counted, did_you_mean, short_repr
from midlayer_encoders.files import exists, expand_home, read_json_lines, read_lines

_log = logging.getLogger(__name__)

_HEADING = re.compile(r"^\s*=.*=\s*$")


def read_texts(path: Path | str, *, field: str | None = None) -> list[str]:
    """Return the nonblank lines of a text file, or a field of each line of a JSONL file.

    Args:
        path: a text or JSONL file.
        field: the field with the text; required for JSONL.
    """
    path = expand_home(path)
    if not exists(path):
        raise OptionError(f"`texts` must be a file, but there is none at {short_repr(str(path), 200)}.")
    if field is None and path.suffix.lower() in (".jsonl", ".ndjson"):
        _, first = next(read_json_lines(path, OptionError), (0, {}))
        raise OptionError(
            f"`field` must name the field with the text in {path.name}, which has "
            f"{', '.join(first) or 'no JSON objects'}."
        )
    if field is None:
        texts = read_lines(path, OptionError)
    else:
        texts = [_field(path, number, row, field) for number, row in read_json_lines(path, OptionError)]
    positions = [position for position, text in enumerate(texts) if text.strip()]
    if not positions:
        raise OptionError(f"`texts` must hold at least one text, but {path} has none.")
    if blank := positions[-1] + 1 - len(positions):  # blank lines at the end do not shift any text
        _log.warning("%s: skipped %s: row n is the n-th text, not the n-th line.", path, counted(blank, "blank line"))
    return [texts[position] for position in positions]


def _field(path: Path, number: int, row: Mapping[str, object], field: str) -> str:
    if field not in row:
        raise OptionError(
            f"`field` must be in every line of {path.name}, but line {number} has "
            f"{', '.join(row) or 'no fields'}.{did_you_mean(field, row)}"
        )
    text = row[field]
    if not isinstance(text, str):
        raise OptionError(f"`field` must hold text, but line {number} of {path.name} has {short_repr(text)}.")
    return text


def wikitext_paragraphs(lines: Sequence[str], count_tokens: Callable[[str], int], *, least: int = 30) -> list[str]:
    """Return WikiText paragraphs of at least ``least`` tokens, without headings (`` = Title = ``).

    Example:
        >>> wikitext_paragraphs([" = Title = ", "too short", "one two three four"], lambda t: len(t.split()), least=4)
        ['one two three four']
    """
    paragraphs = [line.strip() for line in lines if line.strip() and not _HEADING.match(line)]
    return [paragraph for paragraph in paragraphs if count_tokens(paragraph) >= least]
