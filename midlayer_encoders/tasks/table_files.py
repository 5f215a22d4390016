"""Rows of JSONL, CSV, TSV, parquet and text files with their line numbers."""

import csv
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from midlayer_encoders.errors import MidlayerError, OptionError, counted, did_you_mean, short_repr
from midlayer_encoders.files import check_regular_file, read_json_lines, read_lines, read_text_file
from midlayer_encoders.validation import lone_surrogate

#: A requirement for a cell: its description and a function that tests it.
Rule: TypeAlias = tuple[str, Callable[[object], bool]]

_log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
_TASK_COLUMNS = {
    "text", "label", "labels", "sentences", "sentence1", "sentence2", "score",
    "query", "anchor", "positive", "negative",
}  # fmt: skip
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # 007 is a name, not a number


class TaskFileError(MidlayerError, ValueError):
    """A file that is not a valid task."""


class Columns(NamedTuple):
    """How to read a table: its columns of texts and labels, and what to do with rows that lack one.

    Attributes:
        text_column: column of the texts, if it is not ``text``.
        label_column: column of the labels, if it is not ``label``.
        drop_empty: leave out the rows without a text or label, and log how many they are.
    """

    text_column: str | None = None
    label_column: str | None = None
    drop_empty: bool = False

    def renamed(self, names: Sequence[str], path: Path) -> list[str]:
        """Return the names of a table's columns for the rules of tasks, which ignore the case of known names.

        Example:
            >>> Columns(text_column="body").renamed(["id", "body", "Label", "text"], Path("mine.csv"))
            ['id', 'text', 'label', 'text (unused)']
        """
        both = {"text": self.text_column, "label": self.label_column}
        for column, name in both.items():
            if not isinstance(name, str | None):
                raise OptionError(f"`{column}_column` must be the name of a column, but got {short_repr(name)}.")
        if self.text_column is not None and self.text_column == self.label_column:
            raise OptionError(f"`text_column` and `label_column` must differ, but both are {self.text_column!r}.")
        requested = {name: column for column, name in both.items() if name is not None}
        for name, column in requested.items():
            if name not in names:
                raise TaskFileError(
                    f"`{column}_column` must be a column of {path}, which has {', '.join(names)}, but got {name!r}."
                    f"{did_you_mean(name, names)}"
                )
        taken = {*names, *requested.values()}
        result: list[str] = []
        for name in names:
            known = name.strip().lower()
            if known not in _TASK_COLUMNS or known in taken:
                known = f"{name} (unused)" if name in requested.values() else name
            result.append(requested.get(name, known))
            taken.add(result[-1])
        return result


USUAL_NAMES = Columns()


@dataclass(frozen=True)
class Table:
    """The rows of a file or of data in memory.

    Attributes:
        path: path of the file, or name of the data.
        unit: ``"line"`` or ``"row"``.
        numbers: number of each row in these units.
        rows: cells by column.
        drop_empty: whether :meth:`complete` leaves rows out; ``None`` if its caller has no such option.
        names: the user's name of each renamed column.
    """

    path: Path
    unit: str
    numbers: list[int]
    rows: list[dict[str, Any]]
    drop_empty: bool | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rows:
            raise TaskFileError(f"{self.path} must have rows, but is empty.")

    @cached_property
    def columns(self) -> list[str]:
        """All columns, including those that only some rows have."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def renamed(self, columns: Columns) -> Self:
        """Return the table with the names of its columns as tasks know them."""
        names = dict(zip(self.columns, columns.renamed(self.columns, self.path), strict=True))
        rows = [{names[name]: value for name, value in row.items()} for row in self.rows]
        originals = {new: old for old, new in names.items()}
        return replace(self, rows=rows, names=originals, drop_empty=columns.drop_empty)

    def complete(self, *names: str) -> Self:
        """Return the table without the rows that have an empty cell in one of these columns, if it drops rows."""
        kept = [row for row, cells in enumerate(self.rows) if not any(is_empty(cells.get(name)) for name in names)]
        if not self.drop_empty or len(kept) == len(self.rows):
            return self
        columns = " or ".join(f"`{self.names.get(name, name)}`" for name in names)
        dropped = f"{counted(len(self.rows) - len(kept), 'row')} of {len(self.rows):,} without {columns}"
        if not kept:
            raise TaskFileError(f"{self.path} must have rows, but is empty after leaving out {dropped}.")
        _log.warning("%s: left out %s.", self.path, dropped)
        return replace(self, numbers=[self.numbers[row] for row in kept], rows=[self.rows[row] for row in kept])

    def column(self, *names: str, purpose: str = "", cure: str = "") -> str:
        """Return the first of several columns that the table has."""
        for name in names:
            if name in self.columns:
                return name
        raise TaskFileError(
            f"{self.path} must have the column {' or '.join(names)}{purpose}, but has {', '.join(self.columns)}.{cure}"
        )

    def cells(self, name: str, rule: Rule) -> list[Any]:
        """Return a column; raise an error that names the rows whose cells violate the rule."""
        return self.checked({name: rule})[0]

    def checked(self, rules: Mapping[str, Rule]) -> list[list[Any]]:
        """Return columns; raise one error that names the rows whose cells violate the rule of their column."""
        columns = [[row.get(name) for row in self.rows] for name in rules]
        faults = []
        bad_cells = []
        for (name, (requirement, is_valid)), values in zip(rules.items(), columns, strict=True):
            if bad := [row for row, value in enumerate(values) if not is_valid(value)]:
                bad_cells += [values[row] for row in bad]
                name = self.names.get(name, name)
                problem = f"`{name}` must be {requirement}, but got {short_repr(values[bad[0]])}"
                faults.append(f"{self._places(bad)}: {problem}")
        if faults:
            can_drop = self.drop_empty is not None and any(map(is_empty, bad_cells))
            drop = ", or leave out rows without a value: drop_empty=True (--drop-empty)" if can_drop else ""
            cure = f"Correct or remove {'them' if len(bad_cells) > 1 else 'it'}{drop}."
            raise TaskFileError(f"{self.path}, {'; '.join(faults)}. {cure}")
        return columns

    def _places(self, rows: Sequence[int]) -> str:
        places = ", ".join(str(self.numbers[row]) for row in rows[:5])
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        return f"{self.unit}{'s' if len(rows) > 1 else ''} {places}{more}"

    def reject(self, bad: Sequence[int], problem: Callable[[int], str]) -> None:
        """Raise an error with the numbers of the first bad rows, the problem of the first, and the cure, if any."""
        if bad:
            cure = f"Correct or remove {'them' if len(bad) > 1 else 'it'}."
            raise TaskFileError(f"{self.path}, {self._places(bad)}: {problem(bad[0])}. {cure}")

    def check_distinct(self, values: Iterable[Any], noun: str) -> None:
        """Raise an error unless the labels or scores of all rows differ, and are all strings or all numbers."""
        distinct = set(values)
        if len(distinct) < 2:
            raise TaskFileError(
                f"{self.path} must have at least two different {noun}, but all {len(self.rows)} rows have "
                f"{next(iter(distinct), 'none')!r}."
            )
        if len({isinstance(value, str) for value in distinct}) > 1:
            raise TaskFileError(f"{self.path} must have {noun} of one kind, but some are strings and some are numbers.")


def read_table(path: Path, columns: Columns = USUAL_NAMES) -> Table:
    """Return the rows of a nonempty file: one of :data:`SUFFIXES`, or ``.txt``, whose lines are texts."""
    check_regular_file(path, TaskFileError)
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return _read_csv(path, columns)  # how cells are read depends on the names of the columns
    readers = {".parquet": _read_parquet, ".txt": _read_text, ".jsonl": _read_jsonl, ".ndjson": _read_jsonl}
    if suffix not in readers:
        suffixes = ", ".join(SUFFIXES)
        raise TaskFileError(
            f"{path} must be one of {suffixes}, .txt, but its name ends in {path.suffix!r}. Convert it to CSV."
        )
    return readers[suffix](path).renamed(columns)


def is_empty(value: object) -> bool:
    """Return True if a cell is blank, or one of the values that stand for a missing one in JSON, NumPy and pandas."""
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType") or not str(value).strip()


def is_text(value: object) -> bool:
    """Return True if a cell is a nonblank string without unpaired surrogates."""
    return isinstance(value, str) and bool(value.strip()) and lone_surrogate(value) is None


def is_texts(value: object) -> bool:
    """Return True if a cell is a list of such strings."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


def is_label(value: object) -> bool:
    """Return True if a cell is the name or the number of a class; pandas makes 1.0 of 1 next to a missing label."""
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer()) or is_text(value)


def is_score(value: object) -> bool:
    """Return True if a cell is a finite number."""
    # `isfinite` would raise for an integer that is too large for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


TEXT: Rule = ("a string that is not empty", is_text)
TEXT_OR_TEXTS: Rule = (
    "a string that is not empty, or a list of such (in CSV: as JSON)",
    lambda value: is_text(value) or is_texts(value),
)
LABEL: Rule = ("a label, a string or a whole number", is_label)
SCORE: Rule = ("a finite number", is_score)
ZERO_ONE: Rule = ("0 or 1", lambda value: isinstance(value, int | float) and value in (0, 1))


def _read_jsonl(path: Path) -> Table:
    # polars' `read_ndjson` turns the number 5 into "5" and does not name the line of an error.
    rows = list(read_json_lines(path, TaskFileError))
    return Table(path, "line", [number for number, _ in rows], [row for _, row in rows])


def _read_text(path: Path) -> Table:
    lines = [(number, line) for number, line in enumerate(read_lines(path, TaskFileError), 1) if line.strip()]
    return Table(path, "line", [number for number, _ in lines], [{"text": line} for _, line in lines])


def _separator(path: Path, content: str) -> str:
    """Return the separator of a CSV or TSV file, another one if the first line does not contain the usual one."""
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    header = re.split(r"[\r\n]", content.lstrip(), maxsplit=1)[0]
    return usual if usual in header else max(_SEPARATORS, key=lambda mark: (header.count(mark), mark == usual))


def _read_csv(path: Path, columns: Columns) -> Table:
    """Return the rows of a CSV or TSV file; strict parsing detects a quote that is never closed."""
    # polars' `read_csv` decompresses files, renames duplicate columns and does not name the line of an error.
    content = read_text_file(path, TaskFileError)
    separator = _separator(path, content)
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True)
    numbers: list[int] = []  # of the first line of each row that is not blank
    cells: list[list[str]] = []
    line = 1
    limit = csv.field_size_limit(max(len(content), 131072))
    try:
        for row in reader:
            if row:
                numbers.append(line)
                cells.append(row)
            line = reader.line_num + 1
    except csv.Error as error:
        raise TaskFileError(
            f"{path}, line {line}: cannot be read as {path.suffix[1:].upper()}: {error}. A quote inside quotes is "
            "written twice."
        ) from error
    finally:
        csv.field_size_limit(limit)
    header = cells[0] if cells else []
    duplicate = next((name for name in header if header.count(name) > 1), None)
    if duplicate is not None:
        raise TaskFileError(f"{path}, line {numbers[0]}: has two columns named {duplicate!r}. Rename or remove one.")
    for number, row in zip(numbers[1:], cells[1:], strict=True):
        if len(row) > len(header):
            raise TaskFileError(
                f"{path}, line {number}: must have {len(header)} cells, as the first line has, but has {len(row)}. "
                f"Put a cell that holds a {_SEPARATORS[separator]} in quotes."
            )
        row += [""] * (len(header) - len(row))
    names = dict(zip(columns.renamed(header, path), header, strict=True))
    values = [_parsed(name, [row[index] for row in cells[1:]]) for index, name in enumerate(names)]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    return Table(path, "line", numbers[1:], rows, columns.drop_empty, names)


def _read_parquet(path: Path) -> Table:
    import polars as pl

    try:
        rows = pl.read_parquet(path, glob=False).rows(named=True)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        raise TaskFileError(f"{path} cannot be read as parquet: {str(error).partition(chr(10))[0]}.") from error
    return Table(path, "row", list(range(1, len(rows) + 1)), rows)


def _parsed(column: str, cells: list[str]) -> list[Any]:
    """Return the cells of a CSV column as JSON values: numbers and lists for the columns that hold them."""
    if column in ("label", "labels"):
        are_numbers = all(_NUMBER.fullmatch(cell) for cell in cells if cell)  # next to 007, 7 is also a name
        return [(int(cell) if are_numbers else cell) if cell else None for cell in cells]
    read: dict[str, Callable[[str], Any]] = {"score": float, "positive": _list, "negative": _list}
    return [_cell(cell, read.get(column, str)) for cell in cells]


def _list(cell: str) -> Any:
    return json.loads(cell) if cell.lstrip().startswith("[") else cell  # 5 is text


def _cell(cell: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(cell) if cell else None
    except (ValueError, RecursionError):  # the rule of the column reports it
        return cell
