"""Rows of JSONL, CSV, TSV and parquet files with their line numbers."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from midlayer_encoders.errors import MidlayerError, short_repr
from midlayer_encoders.files import check_regular_file, read_json_lines, read_text_file
from midlayer_encoders.validation import lone_surrogate

Rule: TypeAlias = tuple[str, Callable[[object], bool]]
"""A requirement for a cell: its description and a function that tests it."""

SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # 007 is a name, not a number


class TaskFileError(MidlayerError, ValueError):
    """A file that is not a valid task."""


class ColumnsError(TaskFileError):
    """A file whose columns match no task type."""


@dataclass(frozen=True)
class Table:
    """The rows of a file and their line or row numbers."""

    path: Path
    unit: str
    numbers: list[int]
    rows: list[dict[str, Any]]

    @cached_property
    def columns(self) -> list[str]:
        """All columns, including those that only some rows have."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

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


def read_table(path: Path) -> Table:
    """Return the rows of a nonempty file whose suffix is one of :data:`SUFFIXES`."""
    check_regular_file(path, TaskFileError)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise TaskFileError(f"{path} must be one of {', '.join(SUFFIXES)}, but its name ends in {path.suffix!r}.")
    if suffix == ".parquet":
        table = _read_parquet(path)
    else:
        table = _read_csv(path) if suffix in (".csv", ".tsv") else _read_jsonl(path)
    if not table.rows:
        raise TaskFileError(f"{path} must have rows, but is empty.")
    return table


def is_text(value: object) -> bool:
    """Return True if a cell is a nonblank string without unpaired surrogates."""
    return isinstance(value, str) and bool(value.strip()) and lone_surrogate(value) is None


def is_texts(value: object) -> bool:
    """Return True if a cell is a list of such strings."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


def is_label(value: object) -> bool:
    """Return True if a cell is the name or the number of a class."""
    return isinstance(value, int) or is_text(value)


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
ZERO_ONE: Rule = ("0 or 1", lambda value: isinstance(value, int) and value in (0, 1))


def _read_jsonl(path: Path) -> Table:
    # polars' `read_ndjson` turns the number 5 into "5" and does not name the line of an error.
    rows = list(read_json_lines(path, TaskFileError))
    return Table(path, "line", [number for number, _ in rows], [row for _, row in rows])


def _read_csv(path: Path) -> Table:
    """Return the rows of a CSV or TSV file; strict parsing detects a quote that is never closed."""
    # polars' `read_csv` decompresses files, renames duplicate columns and does not name the line of an error.
    content = read_text_file(path, TaskFileError)
    separator, separator_name = ("\t", "tab") if path.suffix.lower() == ".tsv" else (",", "comma")
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
                f"Put a cell that holds a {separator_name} in quotes."
            )
        row += [""] * (len(header) - len(row))
    columns = [_parsed(name, [row[index] for row in cells[1:]]) for index, name in enumerate(header)]
    rows = [dict(zip(header, row, strict=True)) for row in zip(*columns, strict=True)]
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
        if all(map(_NUMBER.fullmatch, cells)):  # next to 007, 7 is also a name
            return list(map(int, cells))
        lists = [_cell(cell, _list) for cell in cells]
        return lists if all(isinstance(value, list) for value in lists) else [cell or None for cell in cells]
    read: dict[str, Callable[[str], Any]] = {"score": float, "positive": _list, "negative": _list}
    return [_cell(cell, read.get(column, str)) for cell in cells]


def _list(cell: str) -> Any:
    return json.loads(cell) if cell.lstrip().startswith("[") else cell  # 5 is text


def _cell(cell: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(cell) if cell else None
    except (ValueError, RecursionError):  # the rule of the column reports it
        return cell
