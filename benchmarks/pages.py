"""Tables, and parts of pages that scripts write: ``<!-- name -->`` before, ``<!-- /name -->`` after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["part_of", "table", "write_part"]


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return rows below their head, as Markdown.

    Example:
        >>> print(table(["layer", "score"], [[1, "40.0"]]), end="")
        | layer | score |
        | --- | --- |
        | 1 | 40.0 |
    """
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in (head, ["---"] * len(head), *rows))


def part_of(page: Path, name: str) -> str:
    """Return what stands between the two comments."""
    return _split(page, name)[1]


def write_part(page: Path, name: str, text: str) -> None:
    """Write what stands between the two comments."""
    before, _, after = _split(page, name)
    page.write_text(before + text + after, encoding="utf8")


def _split(page: Path, name: str) -> tuple[str, str, str]:
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, found, rest = page.read_text(encoding="utf8").partition(start)
    inside, ended, tail = rest.partition(end)
    if not (found and ended):
        raise LookupError(f"{page.name} has no place for {name!r}: write {start.strip()} and {end} into it.")
    return head + start, inside, end + tail
