"""What an encoder is tuned on: pairs, pairs with scores, or texts with labels, told apart by their columns."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.tasks.table_files import Rule, Table, TaskFileError, is_label, is_score, is_text, read_table
from midlayer_encoders.validation import check_list

__all__ = ["Kind", "Pairs", "read_pairs"]

Kind: TypeAlias = Literal["pairs", "scored", "labels"]
Row: TypeAlias = dict[str, Any]

_TEXTS = ("text", "sentences")
_NEGATIVE = re.compile(r"negatives?(_?\d+)?")  # not `negative_score`, which mined data has
_FIRST, _SECOND = ("anchor", "query", "sentence1"), ("positive", "sentence2")
_LABELS = ("label", "labels")
_LEAST = 2  # rows: of one pair nothing can be told apart


@dataclass(frozen=True)
class Pairs:
    """Rows of one kind, no two alike.

    Attributes:
        kind: ``"pairs"`` of ``anchor``, ``positive`` and any ``negative``; ``"scored"`` pairs ``sentence1``,
            ``sentence2``, ``score``; or ``"labels"``: ``text``, ``label``.
        rows: each with the same columns.
        name: of where they come from, for errors.
    """

    kind: Kind
    rows: tuple[Row, ...]
    name: str

    @property
    def digest(self) -> str:
        """What tells these rows from others."""
        return hashlib.blake2b(json.dumps(self.rows).encode(), digest_size=8).hexdigest()

    @property
    def texts(self) -> list[str]:
        """Every text once, in order."""
        return list(dict.fromkeys(cell for row in self.rows for cell in row.values() if isinstance(cell, str)))

    def split(self, share: float, seed: int) -> tuple[Pairs, Pairs | None]:
        """Return the rows to train on, and a random share that is held out, ``None`` where that is 0."""
        rows = list(self.rows)
        random.Random(seed).shuffle(rows)
        count = max(round(share * len(rows)), _LEAST) if share else 0
        parts = [Pairs(self.kind, tuple(part), self.name) for part in (rows[count:], rows[:count])]
        if any(len(part.trained_on(seed)) < _LEAST for part in (parts if count else parts[:1])):
            few = " and too few of each label" if self.kind == "labels" else ""
            raise OptionError(
                f"`pairs` must have {_LEAST} pairs or more to train on, and as many to hold out, but {self.name} has "
                f"{len(rows)} rows{few} for held_out={share:g}. Add rows, or pass held_out=0."
            )
        return parts[0], parts[1] if count else None

    def trained_on(self, seed: int) -> list[Row]:
        """Return the rows as the loss takes them; texts of a label are paired with one another, in a random order."""
        if self.kind != "labels":
            return list(self.rows)
        numbers = {label: number for number, label in enumerate(sorted({row["label"] for row in self.rows}, key=str))}
        by_label: dict[int, list[str]] = {}
        for row in self.rows:
            by_label.setdefault(numbers[row["label"]], []).append(row["text"])
        made = []
        for label, texts in by_label.items():
            random.Random(f"{seed} {label}").shuffle(texts)
            ring = pairwise([*texts, texts[0]]) if len(texts) > 1 else []  # each is an anchor once
            made += [{"anchor": one, "positive": other, "label": label} for one, other in ring]
        return made


def read_pairs(pairs: Path | str | Sequence[Mapping[str, Any]]) -> Pairs:
    """Return the rows of a file (JSONL, CSV, TSV, parquet), or of a list of dicts.

    Raises:
        TaskFileError: naming the file, the rows and the columns that cannot be used, and what they must be.
    """
    if isinstance(pairs, Path | str):
        table = read_table(Path(pairs))
    else:
        rows = [_row(row) for row in check_list("pairs", pairs, "rows")]
        table = Table(Path("`pairs`"), "row", list(range(1, len(rows) + 1)), rows)
    kind, rows = _rows(table)
    distinct = tuple(json.loads(row) for row in dict.fromkeys(json.dumps(row) for row in rows))
    if len(distinct) < _LEAST:
        raise TaskFileError(
            f"{table.path} must have two rows or more that differ, but "
            + (f"all {len(rows)} are alike." if len(rows) > 1 else "has one.")
            + " What is not in a pair is what it is told apart from."
        )
    _check(kind, distinct, table.path)
    return Pairs(kind, distinct, table.path.name)


def _row(row: object) -> Row:
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise OptionError(f"`pairs` must hold dicts, as {{'anchor': …, 'positive': …}}, but got {short_repr(row)}.")
    return dict(row)


def _rows(table: Table) -> tuple[Kind, list[Row]]:
    """Return what kind of rows a table holds, and the rows by the names of that kind."""
    text, first, second, label, score = (
        next((name for name in names if name in table.columns), None)
        for names in (_TEXTS, _FIRST, _SECOND, _LABELS, ("score",))
    )
    if first is None or second is None:
        if text is None or label is None:
            raise TaskFileError(
                f"{table.path} must have the columns of pairs, but has {', '.join(table.columns)}. Pairs: anchor and "
                "positive (query and positive, or sentence1 and sentence2), with hard negatives in negative, "
                "negative_2 and so on; pairs with a degree: score, or label 0 or 1, too; classes: text and label."
            )
        texts, labels = table.cells(text, _TEXT), table.cells(label, _LABEL)
        return "labels", [{"text": one, "label": of} for one, of in zip(texts, labels, strict=True)]
    if score is not None or label is not None:
        rule = _SCORE if score is not None else _ZERO_ONE
        cells = [table.cells(first, _TEXT), table.cells(second, _TEXT), table.cells(score or str(label), rule)]
        return "scored", [{"sentence1": a, "sentence2": b, "score": float(of)} for a, b, of in zip(*cells, strict=True)]
    negatives = [name for name in table.columns if _NEGATIVE.fullmatch(name)]
    columns = [table.cells(first, _TEXT), *(table.cells(name, _SOME_TEXT) for name in (second, *negatives))]
    names = ("anchor", "positive", *negatives)
    return "pairs", [dict(zip(names, row, strict=True)) for cells in zip(*columns, strict=True) for row in _each(cells)]


def _each(cells: Sequence[str | list[str]]) -> list[tuple[str, ...]]:
    """Return a row for each positive of a list, with negatives of theirs in turn."""
    anchor, positive, *others = ([cell] if isinstance(cell, str) else cell for cell in cells)
    return [(*anchor, one, *(texts[number % len(texts)] for texts in others)) for number, one in enumerate(positive)]


def _check(kind: Kind, rows: Sequence[Row], path: Path) -> None:
    """Raise where nothing can be learned from rows that are each right."""
    if kind == "pairs" and all(row["anchor"] == row["positive"] for row in rows):
        raise TaskFileError(f"{path} must pair texts with others, but in all {len(rows)} rows both are the same text.")
    if kind == "pairs":
        return
    column = "score" if kind == "scored" else "label"
    if len({row[column] for row in rows}) < 2:
        raise TaskFileError(
            f"{path} must have at least two different values in its column of {column}s, but all {len(rows)} rows have "
            f"{rows[0][column]!r}."
        )
    if kind == "labels" and len({isinstance(row["label"], str) for row in rows}) > 1:
        raise TaskFileError(f"{path} must have labels of one kind, but some are strings and some are numbers.")


def _is_some(value: object) -> bool:
    return is_text(value) or (isinstance(value, list) and bool(value) and all(map(is_text, value)))


_TEXT: Rule = ("a string that is not empty", is_text)
_SOME_TEXT: Rule = ("a string that is not empty, or a list of such", _is_some)
_LABEL: Rule = ("a label, a string or a whole number", is_label)
_SCORE: Rule = ("a finite number", is_score)
_ZERO_ONE: Rule = ("0 or 1", lambda value: isinstance(value, int) and value in (0, 1))
