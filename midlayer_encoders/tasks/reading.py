"""Rows out of JSONL, CSV and parquet files, each with the number under which an editor finds it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midlayer_encoders.errors import MidlayerError

__all__ = ["SUFFIXES", "Table", "TaskFileError", "read_table"]

SUFFIXES = (".jsonl", ".ndjson", ".csv", ".parquet")


class TaskFileError(MidlayerError, ValueError):
    """A file that cannot be a task as it is."""


@dataclass(frozen=True)
class Table:
    """The rows of one file, with the number under which each is found there."""

    path: Path
    unit: str
    numbers: list[int]
    rows: list[dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        """Every column that some row has."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


def read_table(path: Path) -> Table:
    """Return the rows of a file whose suffix is one of :data:`SUFFIXES`; there is at least one."""
    readers: dict[str, Callable[[Path], Table]] = {
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    if path.suffix.lower() not in readers:
        raise TaskFileError(f"{path} must be one of {', '.join(SUFFIXES)}, but its name ends in {path.suffix!r}.")
    table = readers[path.suffix.lower()](path)
    if not table.rows:
        raise TaskFileError(f"{path} must have rows, but is empty.")
    return table


def _read_jsonl(path: Path) -> Table:
    # Not polars' `read_ndjson`: it turns the text 5 into "5" and names no line.
    numbers, rows = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise TaskFileError(
                    f"{path}, line {number}: must be one JSON object, but cannot be read: {error}."
                ) from error
            if not isinstance(row, dict):
                raise TaskFileError(f"{path}, line {number}: must be one JSON object, but got {line[:40].decode()!r}.")
            numbers.append(number)
            rows.append(row)
    return Table(path, "line", numbers, rows)


def _read_csv(path: Path) -> Table:
    import polars as pl

    try:
        # Without inferred types, so that a text of digits stays a text.
        frame = pl.read_csv(path, infer_schema=False)
    except pl.exceptions.NoDataError:
        return Table(path, "row", [], [])
    except pl.exceptions.PolarsError as error:
        raise TaskFileError(f"{path} cannot be read as CSV: {_first_line(error)}") from error
    rows = [{name: _parsed(name, cell) for name, cell in row.items()} for row in frame.iter_rows(named=True)]
    return Table(path, "row", list(range(1, len(rows) + 1)), rows)


def _read_parquet(path: Path) -> Table:
    import polars as pl

    try:
        rows = pl.read_parquet(path).rows(named=True)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise TaskFileError(f"{path} cannot be read as parquet: {_first_line(error)}") from error
    return Table(path, "row", list(range(1, len(rows) + 1)), rows)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _parsed(column: str, cell: str | None) -> Any:
    """A CSV cell as JSON would have it: numbers in number columns, lists in list columns, text elsewhere."""
    if cell is None:
        return None
    if column in ("positive", "negative") and cell.startswith("["):
        try:
            return json.loads(cell)
        except json.JSONDecodeError:
            return cell
    if column in ("label", "labels") and re.fullmatch(r"-?\d+", cell):
        return int(cell)
    if column == "score":
        try:
            return float(cell)
        except ValueError:
            return cell
    return cell
