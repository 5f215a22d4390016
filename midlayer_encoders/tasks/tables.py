"""Tables of files (JSONL, CSV, TSV, parquet, text) and of data in memory, whose errors name the rows."""

import csv
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

from midlayer_encoders.errors import MidlayerError, OptionError, did_you_mean, pluralize, short_repr
from midlayer_encoders.files import check_regular_file, read_json_lines, read_lines, read_text_file
from midlayer_encoders.validation import lone_surrogate

#: A requirement for a cell: its description and a function that tests it.
Rule: TypeAlias = tuple[str, Callable[[object], bool]]

_log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
#: End of the error for a table whose columns have other names.
COLUMN_CURE = (
    "Name yours with text_column=… and label_column=… (--text-column, --label-column). The first line of a CSV file "
    "must be names."
)
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

    def rename(self, names: Iterable[str], path: Path) -> dict[str, str]:
        """Return the name of each column for the rules of tasks, which ignore the case of known names.

        Example:
            >>> Columns(text_column="body").rename(["id", "body", "Label", "text"], Path("mine.csv"))
            {'id': 'id', 'body': 'text', 'Label': 'label', 'text': 'text (unused)'}
        """
        requested = {}
        for column, name in (("text", self.text_column), ("label", self.label_column)):
            if not isinstance(name, str | None):
                raise OptionError(f"`{column}_column` must be the name of a column, but got {short_repr(name)}.")
            if name in requested:
                raise OptionError(f"`text_column` and `label_column` must differ, but both are {name!r}.")
            if name is not None and name not in names:
                raise TaskFileError(
                    f"`{column}_column` must be a column of {path}, which has {', '.join(names)}, but got {name!r}."
                    f"{did_you_mean(name, list(names))}"
                )
            if name is not None:
                requested[name] = column
        taken = {*names, *requested.values()}
        result: dict[str, str] = {}
        for name in names:
            known = name.strip().lower()
            if known not in _TASK_COLUMNS or known in taken:
                known = f"{name} (unused)" if name in requested.values() else name
            result[name] = requested.get(name, known)
            taken.add(result[name])
        return result


USUAL_NAMES = Columns()


@dataclass(frozen=True)
class Table:
    """The rows of a file or of data in memory.

    Attributes:
        path: path of the file, or name of the data.
        unit: ``"line"`` or ``"row"``.
        numbers: number of each row in these units.
        columns: cells by column.
        drop_empty: whether :meth:`complete` leaves rows out; ``None`` if its caller has no such option.
        names: the user's name of each renamed column.
    """

    path: Path
    unit: str
    numbers: Sequence[int]
    columns: Mapping[str, list[Any]]
    drop_empty: bool | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.numbers:
            raise TaskFileError(f"{self.path} must have rows, but is empty.")

    def rename_columns(self, columns: Columns) -> Self:
        """Return the table with the names of its columns as tasks know them."""
        names = columns.rename(self.columns, self.path)
        renamed = {names[name]: cells for name, cells in self.columns.items()}
        originals = {new: old for old, new in names.items()}
        return replace(self, columns=renamed, names=originals, drop_empty=columns.drop_empty)

    def parse(self) -> Self:
        """Return the table of a CSV file with numbers and lists in the columns that hold them."""
        return replace(self, columns={name: _parse_column(name, cells) for name, cells in self.columns.items()})

    def complete(self, *names: str) -> Self:
        """Return the table without the rows that have an empty cell in one of these columns, if it drops rows."""
        cells = [self.columns.get(name, []) for name in names]
        empty = {row for column in cells for row, value in enumerate(column) if is_empty(value)}
        if not self.drop_empty or not empty:
            return self
        columns = " or ".join(f"`{self.names.get(name, name)}`" for name in names)
        dropped = f"{pluralize(len(empty), 'row')} of {len(self.numbers):,} without {columns}"
        kept = [row for row in range(len(self.numbers)) if row not in empty]
        if not kept:
            raise TaskFileError(f"{self.path} must have rows, but is empty after leaving out {dropped}.")
        _log.warning("%s: left out %s.", self.path, dropped)
        remaining = {name: [column[row] for row in kept] for name, column in self.columns.items()}
        return replace(self, numbers=[self.numbers[row] for row in kept], columns=remaining)

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
        return self.check_columns({name: rule})[0]

    def check_columns(self, rules: Mapping[str, Rule]) -> list[list[Any]]:
        """Return columns; raise one error that names the rows whose cells violate the rule of their column."""
        columns = [self.columns.get(name, [None] * len(self.numbers)) for name in rules]
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
                f"{self.path} must have at least two different {noun}, but all {len(self.numbers)} rows have "
                f"{next(iter(distinct), 'none')!r}."
            )
        if len({isinstance(value, str) for value in distinct}) > 1:
            raise TaskFileError(f"{self.path} must have {noun} of one kind, but some are strings and some are numbers.")


def read_table(source: Any, columns: Columns = USUAL_NAMES, name: str = "data") -> Table:
    """Return a nonempty table.

    Args:
        source: path of a file: one of :data:`SUFFIXES`, or ``.txt``, whose lines are texts; or data in memory, as in
            :func:`is_data`.
        columns: names of the columns.
        name: name of data in memory.
    """
    if not isinstance(source, Path):
        cells = _columns_in_memory(source, name)
        return _table(Path(name), "row", cells).rename_columns(columns)
    check_regular_file(source, TaskFileError)
    suffix = source.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return _read_csv(source).rename_columns(columns).parse()
    if suffix == ".parquet":
        return _read_parquet(source).rename_columns(columns)
    if suffix == ".txt":
        lines = [(number, line) for number, line in enumerate(read_lines(source, TaskFileError), 1) if line.strip()]
        cells = {"text": [line for _, line in lines]}
        return Table(source, "line", [number for number, _ in lines], cells).rename_columns(columns)
    if suffix in (".jsonl", ".ndjson"):
        # polars' `read_ndjson` turns the number 5 into "5" and does not name the line of an error.
        rows = list(read_json_lines(source, TaskFileError))
        cells = _columns_of_rows([row for _, row in rows])
        return Table(source, "line", [number for number, _ in rows], cells).rename_columns(columns)
    raise TaskFileError(
        f"{source} must be one of {', '.join(SUFFIXES)}, .txt, but its name ends in {source.suffix!r}. Convert it."
    )


def is_data(value: object) -> bool:
    """Return True for data in memory, and False for the name, path or object of a task and for lists of these.

    Example:
        >>> is_data((["a text"], ["a label"])), is_data([("a text", "a label")]), is_data([{"text": "a text"}])
        (True, True, True)
        >>> is_data(("STS12", "STS13")), is_data(["STS12", {"text": ["a text"]}])
        (False, False)
    """
    if isinstance(value, tuple):
        return len(value) == 2 and all(map(_is_column, value)) and isinstance(next(iter(value[0]), None), str)
    if isinstance(value, list):
        return bool(value) and (all(isinstance(row, Mapping) for row in value) or all(map(_is_pair, value)))
    return isinstance(value, Mapping) or _is_frame(value)


def is_dict_of_data(value: object) -> bool:
    """Return True for a dict of data in memory, by split or by the name of its task."""
    return isinstance(value, Mapping) and bool(value) and all(map(is_data, value.values()))


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


def _is_frame(value: object) -> bool:
    """Return True for a data frame of pandas or polars, a dataset or a pyarrow table."""
    has_columns = hasattr(value, "columns") or hasattr(value, "column_names")
    return has_columns and isinstance(shape := getattr(value, "shape", None), tuple) and len(shape) == 2


def _is_column(value: object) -> bool:
    is_sequence = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return is_sequence and not isinstance(value, str | Mapping) and not _is_frame(value)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str)


def _columns_in_memory(data: Any, name: str) -> dict[str, list[Any]]:
    """Return the columns of data in memory."""
    import polars as pl

    if isinstance(data, list) and isinstance(data[0], Mapping):
        return _columns_of_rows(data)
    if isinstance(data, list):
        data = tuple(zip(*data, strict=True))
    if isinstance(data, tuple):
        data = dict(zip(("text", "label"), data, strict=True))
    if isinstance(data, Mapping):
        columns = {str(column): [_as_python(cell) for cell in cells] for column, cells in data.items()}
        if len(set(map(len, columns.values()))) > 1:
            sizes = ", ".join(f"{len(cells)} of {column}" for column, cells in columns.items())
            raise TaskFileError(f"{name} must have columns of the same length, but has {sizes}.")
        return columns
    try:
        frame = pl.DataFrame(data.to_polars() if hasattr(data, "to_polars") else data)
    except (pl.exceptions.PolarsError, ValueError, TypeError) as error:
        raise TaskFileError(f"{name} cannot be read: {error}. Rename or convert its columns.") from error
    return frame.to_dict(as_series=False)


def _columns_of_rows(rows: Sequence[Mapping[Any, Any]]) -> dict[str, list[Any]]:
    """Return columns of rows, of which some may lack cells."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {str(name): [_as_python(row.get(name)) for row in rows] for name in names}


def _as_python(cell: Any) -> Any:
    """Return the Python value of a NumPy scalar or array."""
    return cell.tolist() if hasattr(cell, "tolist") else cell


def _table(path: Path, unit: str, columns: dict[str, list[Any]]) -> Table:
    return Table(path, unit, range(1, 1 + len(next(iter(columns.values()), []))), columns)


def _read_parquet(path: Path) -> Table:
    import polars as pl

    try:
        return _table(path, "row", pl.read_parquet(path, glob=False).to_dict(as_series=False))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        raise TaskFileError(f"{path} cannot be read as parquet: {str(error).partition(chr(10))[0]}.") from error


def _read_csv(path: Path) -> Table:
    """Return the cells of a CSV or TSV file as strings; its separator is the usual one, if the first line has it."""
    # polars' `read_csv` decompresses files, renames duplicate columns and does not name the line of an error.
    content = read_text_file(path, TaskFileError)
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    header = re.split(r"[\r\n]", content.lstrip(), maxsplit=1)[0]
    separator = max(_SEPARATORS, key=lambda mark: (mark == usual and mark in header, header.count(mark), mark == usual))
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True)
    rows: dict[int, list[str]] = {}  # by their first line, without blank ones
    line = 1
    limit = csv.field_size_limit(max(len(content), 131072))
    try:
        for row in reader:
            if row:
                rows[line] = row
            line = reader.line_num + 1
    except csv.Error as error:
        kind = path.suffix[1:].upper()
        raise TaskFileError(
            f"{path}, line {line}: cannot be read as {kind}: {error}. A quote inside quotes is written twice."
        ) from error
    finally:
        csv.field_size_limit(limit)
    (first, names), *lines = rows.items() or [(1, [])]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise TaskFileError(f"{path}, line {first}: has two columns named {min(duplicates)!r}. Rename or remove one.")
    for number, cells in lines:
        if len(cells) > len(names):
            raise TaskFileError(
                f"{path}, line {number}: must have {len(names)} cells, as the first line has, but has {len(cells)}. "
                f"Put a cell that holds a {_SEPARATORS[separator]} in quotes."
            )
        cells += [""] * (len(names) - len(cells))
    columns = {name: [cells[place] or None for _, cells in lines] for place, name in enumerate(names)}
    return Table(path, "line", [number for number, _ in lines], columns)


def _parse_column(name: str, cells: list[str | None]) -> list[Any]:
    """Return the cells of a CSV column as JSON values: numbers and lists for the columns that hold them."""
    if name in ("label", "labels"):
        are_numbers = all(_NUMBER.fullmatch(cell) for cell in cells if cell)  # next to 007, 7 is also a name
        return [int(cell) if cell and are_numbers else cell for cell in cells]
    parsers: dict[str, Callable[[str], Any]] = {"score": float, "positive": _parse_list, "negative": _parse_list}
    return [_parse_cell(cell, parsers.get(name, str)) if cell else None for cell in cells]


def _parse_list(cell: str) -> Any:
    return json.loads(cell) if cell.lstrip().startswith("[") else cell  # 5 is text


def _parse_cell(cell: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(cell)
    except (ValueError, RecursionError):  # the rule of the column reports it
        return cell
