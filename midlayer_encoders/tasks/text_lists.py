"""Read lists of texts, and prepare WikiText as in the paper."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from midlayer_encoders.errors import OptionError, pluralize, short_repr
from midlayer_encoders.files import exists, expand_home, read_lines

_log = logging.getLogger(__name__)

_HEADING = re.compile(r"^\s*=.*=\s*$")


def read_texts(path: Path | str) -> list[str]:
    """Return the nonblank lines of a text file.

    Args:
        path: a text file.
    """
    path = expand_home(path)
    if not exists(path):
        raise OptionError(f"`texts` must be a file, but there is none at {short_repr(str(path), 200)}.")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        raise OptionError(f"`texts` must be a file with a text per line, but {path.name} has JSON. Pass its texts.")
    texts = read_lines(path, OptionError)
    positions = [position for position, text in enumerate(texts) if text.strip()]
    if not positions:
        raise OptionError(f"`texts` must hold at least one text, but {path} has none.")
    if blank := positions[-1] + 1 - len(positions):  # blank lines at the end do not shift any text
        _log.warning("%s: skipped %s: row n is the n-th text, not the n-th line.", path, pluralize(blank, "blank line"))
    return [texts[position] for position in positions]


def wikitext_paragraphs(lines: Sequence[str], count_tokens: Callable[[str], int], *, least: int = 30) -> list[str]:
    """Return WikiText paragraphs of at least ``least`` tokens, without headings (`` = Title = ``).

    Example:
        >>> wikitext_paragraphs([" = Title = ", "too short", "one two three four"], lambda t: len(t.split()), least=4)
        ['one two three four']
    """
    paragraphs = [line.strip() for line in lines if line.strip() and not _HEADING.match(line)]
    return [paragraph for paragraph in paragraphs if count_tokens(paragraph) >= least]
