"""Rows of JSONL, CSV, TSV, parquet and text files with their line numbers."""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from midlayer_encoders.errors import MidlayerError, did_you_mean, short_repr
from midlayer_encoders.files import check_regular_file, read_json_lines, read_lines, read_text_file
from midlayer_encoders.validation import lone_surrogate

#: A requirement for a cell: its description and a function that tests it.
Rule: TypeAlias = tuple[str, Callable[[object], bool]]

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
    """The columns of texts and labels, if their names are not ``text`` and ``label``."""

    text: str | None = None
    label: str | None = None

    def renamed(self, names: Sequence[str], path: Path) -> list[str]:
        """Return the names of a table's columns for the rules of tasks, which ignore the case of known names.

        Example:
            >>> Columns(text="body").renamed(["id", "body", "Label", "text"], Path("mine.csv"))
            ['id', 'text', 'label', 'text (unused)']
        """
        requested = {name: column for column, name in self._asdict().items() if name is not None}
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
    """The rows of a file or of data in memory, and their line or row numbers."""

    path: Path
    unit: str
    numbers: list[int]
    rows: list[dict[str, Any]]

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
        if all(old == new for old, new in names.items()):
            return self
        return replace(self, rows=[{names[name]: value for name, value in row.items()} for row in self.rows])

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
        requirement, is_valid = rule
        values = [row.get(name) for row in self.rows]
        bad = [number for number, value in enumerate(values) if not is_valid(value)]
        self.reject(bad, lambda row: f"`{name}` must be {requirement}, but got {short_repr(values[row])}")
        return values

    def reject(self, bad: Sequence[int], problem: Callable[[int], str]) -> None:
        """Raise an error with the numbers of the first bad rows, the problem of the first, and the cure, if any."""
        if bad:
            places = ", ".join(str(self.numbers[row]) for row in bad[:5])
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            unit = self.unit + ("s" if len(bad) > 1 else "")
            cure = f"Correct or remove {'them' if len(bad) > 1 else 'it'}."
            raise TaskFileError(f"{self.path}, {unit} {places}{more}: {problem(bad[0])}. {cure}")

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
    header = columns.renamed(header, path)
    values = [_parsed(name, [row[index] for row in cells[1:]]) for index, name in enumerate(header)]
    rows = [dict(zip(header, row, strict=True)) for row in zip(*values, strict=True)]
    return Table(path, "line", numbers[1:], rows)


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
        are_numbers = all(map(_NUMBER.fullmatch, cells))  # next to 007, 7 is also a name
        return list(map(int, cells)) if are_numbers else [cell or None for cell in cells]
    read: dict[str, Callable[[str], Any]] = {"score": float, "positive": _list, "negative": _list}
    return [_cell(cell, read.get(column, str)) for cell in cells]


def _list(cell: str) -> Any:
    return json.loads(cell) if cell.lstrip().startswith("[") else cell  # 5 is text


def _cell(cell: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(cell) if cell else None
    except (ValueError, RecursionError):  # the rule of the column reports it
        return cell
