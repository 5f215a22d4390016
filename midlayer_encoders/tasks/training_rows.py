"""Read the rows that an encoder is trained on: pairs, scored pairs or labeled texts by their columns, or texts."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from midlayer_encoders._types import content_digest
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.files import expand_home
from midlayer_encoders.tasks import tables
from midlayer_encoders.tasks.sources import TaskSource, own_texts, task_sources
from midlayer_encoders.tasks.tables import TEXT, TEXT_OR_TEXTS, USUAL_NAMES, Columns, Table, TaskFileError, read_table
from midlayer_encoders.validation import check_count, check_list, check_texts

RowKind: TypeAlias = Literal["pairs", "scored", "labels", "texts"]
Row: TypeAlias = dict[str, Any]

_TEXT_COLUMNS = ("text", "sentences")
_ANCHOR_COLUMNS = ("anchor", "query", "sentence1")
_POSITIVE_COLUMNS = ("positive", "sentence2")
_LABEL_COLUMNS = ("label", "labels")
_NEGATIVE = re.compile(r"negatives?(_?\d+)?")  # not `negative_score`, a column of mined data
_MIN_ROWS = 2


@dataclass(frozen=True)
class TrainingRows:
    """Distinct rows of one kind.

    Attributes:
        kind: ``"pairs"`` of ``anchor``, ``positive`` and any ``negative``; ``"scored"`` pairs ``sentence1``,
            ``sentence2``, ``score``; ``"labels"``: ``text``, ``label``; or ``"texts"``, whose label is their number.
        rows: with the same columns each.
        name: of their file, for errors.
        named_columns: the arguments that name columns of their file.
    """

    kind: RowKind
    rows: tuple[Row, ...]
    name: str
    named_columns: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A hash of the rows."""
        return content_digest(json.dumps(self.rows), 8)

    @property
    def texts(self) -> list[str]:
        """The distinct texts, in order."""
        return list(dict.fromkeys(cell for row in self.rows for cell in row.values() if isinstance(cell, str)))

    def split(self, share: float, seed: int) -> tuple[Self, Self | None]:
        """Return the rows to train on and a random held-out share, ``None`` if the share is 0."""
        rows = list(self.rows)
        random.Random(seed).shuffle(rows)
        count = max(round(share * len(rows)), _MIN_ROWS) if share else 0
        train = replace(self, rows=tuple(rows[count:]))
        held_out = replace(self, rows=tuple(rows[:count])) if count else None
        if any(part and len(part.loss_rows(seed)) < _MIN_ROWS for part in (train, held_out)):
            reason = " and too few of each label" if self.kind == "labels" else ""
            noun = "texts" if self.kind == "texts" else "pairs"
            raise OptionError(
                f"`{noun}` must have {_MIN_ROWS} {noun} or more to train on, and as many to hold out, but {self.name} "
                f"has {len(rows)} rows{reason} for held_out={share:g}. Add rows, or pass held_out=0."
            )
        return train, held_out

    def loss_rows(self, seed: int) -> list[Row]:
        """Return the rows for the loss; texts of a label are paired with one another in a random order."""
        if self.kind != "labels":
            return list(self.rows)
        numbers = {label: number for number, label in enumerate(sorted({row["label"] for row in self.rows}, key=str))}
        by_label: dict[int, list[str]] = {}
        for row in self.rows:
            by_label.setdefault(numbers[row["label"]], []).append(row["text"])
        rows: list[Row] = []
        for label, texts in by_label.items():
            random.Random(f"{seed} {label}").shuffle(texts)
            ring = pairwise([*texts, texts[0]]) if len(texts) > 1 else []  # each text is an anchor once
            rows += [{"anchor": anchor, "positive": positive, "label": label} for anchor, positive in ring]
        return rows


def read_pairs(pairs: Path | str | Sequence[Mapping[str, Any]], columns: Columns = USUAL_NAMES) -> TrainingRows:
    """Return the rows of a file (JSONL, CSV, TSV, parquet), or of a list of dicts.

    Args:
        pairs: file or rows.
        columns: how to read them; its names apply to labeled texts, not to pairs.

    Raises:
        TaskFileError: naming the file, the invalid rows and columns, and the requirement.
    """
    source: Any = Path(pairs) if isinstance(pairs, Path | str) else check_list("pairs", pairs, "rows")
    if isinstance(source, list) and not all(isinstance(row, Mapping) for row in source):
        raise OptionError(f"`pairs` must hold dicts, as {{'anchor': …, 'positive': …}}, but got {short_repr(source)}.")
    table = read_table(source, Columns(drop_empty=columns.drop_empty), "`pairs`")
    if columns != USUAL_NAMES and not _has_pairs(table):
        table = read_table(source, columns, "`pairs`")  # the cells of a label are read in their own way
    kind, rows = _rows(table)
    distinct = tuple(json.loads(row) for row in dict.fromkeys(json.dumps(row) for row in rows))
    if len(distinct) < _MIN_ROWS:
        raise TaskFileError(f"{table.path} must have two rows or more that differ, but has {len(distinct)}.")
    if kind == "pairs" and all(row["anchor"] == row["positive"] for row in distinct):
        raise TaskFileError(
            f"{table.path} must pair texts with others, but in all {len(rows)} rows both are the same text."
        )
    if kind != "pairs":
        column = "score" if kind == "scored" else "label"
        table.check_distinct((row[column] for row in distinct), f"{column}s")
    named_columns = ("text_column", "label_column") if kind == "labels" else ()
    return TrainingRows(kind, distinct, table.path.name, named_columns)


def read_training_texts(
    texts: Path | str | Sequence[str], columns: Columns = USUAL_NAMES, limit: int | None = None
) -> TrainingRows:
    """Return the distinct texts of a file or of a list.

    Args:
        texts: a list, or a file: a text per line, or a table with a column ``text``.
        columns: how to read a file.
        limit: maximum number of texts, the first ones.
    """
    named_columns: tuple[str, ...] = ()
    if isinstance(texts, Path | str):
        path = expand_home(texts)
        name = path.name
        named_columns = () if path.suffix.lower() == ".txt" else ("text_column",)
        lines = own_texts(path, columns if named_columns else USUAL_NAMES)
    else:
        name = "`texts`"
        lines = check_texts("texts", texts)
    number = None if limit is None else check_count("limit", limit, "texts")
    distinct = dict.fromkeys(text for text in lines[:number] if text.strip())
    rows = tuple({"text": text, "label": number} for number, text in enumerate(distinct))
    return TrainingRows("texts", rows, name, named_columns)


def read_rows(pairs: Any, texts: Any, columns: Columns, *, objective: str) -> TrainingRows:
    """Return the rows to tune on: pairs, or texts for the objective ``"mntp"``."""
    needed, other = ("texts", "pairs") if objective == "mntp" else ("pairs", "texts")
    values = {"pairs": pairs, "texts": texts}
    if values[needed] is None or values[other] is not None:
        raise OptionError(
            f"`{needed}` must be given, and `{other}` left out, with objective={objective!r}, which trains on {needed}."
        )
    return read_pairs(pairs, columns) if texts is None else read_training_texts(texts, columns)


def scored_tasks(tasks: Any, columns: Columns, rows: TrainingRows) -> list[TaskSource] | None:
    """Return the tasks to score, or ``None`` for none; raise for unknown ones before a model is loaded.

    Args:
        tasks: as in :func:`~midlayer_encoders.sweep`.
        columns: how to read the user's own data.
        rows: to train on. Names of columns that do not apply to them must apply to a task.
    """
    names = {"text_column", "label_column"} - set(rows.named_columns)
    unused = sorted(name for name in names if getattr(columns, name) is not None)
    if isinstance(tasks, tuple) and not tasks:
        if unused:
            raise OptionError(f"`{unused[0]}` must be left out for {rows.name}, without tasks of your own.")
        return None
    return task_sources(tasks, columns, must_apply=bool(unused))


def _has_pairs(table: Table) -> bool:
    return all(set(names) & set(table.columns) for names in (_ANCHOR_COLUMNS, _POSITIVE_COLUMNS))


def _rows(table: Table) -> tuple[RowKind, list[Row]]:
    """Return the kind of a table's rows, and the rows with the column names of that kind."""
    text, anchor, positive, label, score = (
        next((name for name in names if name in table.columns), None)
        for names in (_TEXT_COLUMNS, _ANCHOR_COLUMNS, _POSITIVE_COLUMNS, _LABEL_COLUMNS, ("score",))
    )
    if anchor is None or positive is None:
        if text is None or label is None:
            raise TaskFileError(
                f"{table.path} must have the columns of pairs, but has {', '.join(table.columns)}. Pairs: anchor and "
                "positive (query and positive, or sentence1 and sentence2), with hard negatives in negative, "
                "negative_2 and so on; scored pairs: score, or label 0 or 1, too; classes: text and label. "
                f"{tables.COLUMN_CURE}"
            )
        cells = table.complete(text, label).check_columns({text: TEXT, label: tables.LABEL})
        return "labels", [dict(zip(("text", "label"), row, strict=True)) for row in zip(*cells, strict=True)]
    if score is not None or label is not None:
        rule = tables.SCORE if score is not None else tables.ZERO_ONE
        rules = {anchor: TEXT, positive: TEXT, score or str(label): rule}
        first, second, scores = table.complete(*rules).check_columns(rules)
        names: tuple[str, ...] = ("sentence1", "sentence2", "score")
        pairs = zip(first, second, map(float, scores), strict=True)
        return "scored", [dict(zip(names, row, strict=True)) for row in pairs]
    negatives = [name for name in table.columns if _NEGATIVE.fullmatch(name)]
    rules = {anchor: TEXT, **dict.fromkeys((positive, *negatives), TEXT_OR_TEXTS)}
    columns = table.complete(*rules).check_columns(rules)
    names = ("anchor", "positive", *negatives)
    rows = [row for cells in zip(*columns, strict=True) for row in _rows_of_positives(cells)]
    return "pairs", [dict(zip(names, row, strict=True)) for row in rows]


def _rows_of_positives(cells: Sequence[str | list[str]]) -> list[tuple[str, ...]]:
    """Return one row for each positive of a list, with the negatives of each column in turn."""
    anchor, positives, *negatives = ([cell] if isinstance(cell, str) else cell for cell in cells)
    return [
        (*anchor, positive, *(texts[number % len(texts)] for texts in negatives))
        for number, positive in enumerate(positives)
    ]
