"""Tables of data in memory: data frames, datasets, columns, rows, and texts with their labels."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midlayer_encoders.tasks.table_files import Columns, Table, TaskFileError

_SPLITS = {"train", "test", "validation"}
_ROW_METHODS: Mapping[str, tuple[str, ...]] = {
    "to_dicts": (),  # polars
    "to_pylist": (),  # pyarrow
    "to_list": (),  # datasets
    "to_dict": ("records",),  # pandas
}


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


def is_named(data: object) -> bool:
    """Return True for a dict of the data of several tasks by their names."""
    return _is_dict_of_data(data) and not _SPLITS & data.keys()  # type: ignore[attr-defined]


def split_tables(data: Any, name: str, columns: Columns) -> dict[str, Table]:
    """Return the tables of data in memory: ``test``, and ``train`` if there is one.

    Args:
        data: a data frame of pandas or polars, a dataset, a dict of columns, a list of dicts or of pairs of a text and
            its label, or a tuple of texts and labels; or a dict of such by split.
        name: name of the data in errors.
        columns: names of the columns.
    """
    splits = data if _is_dict_of_data(data) else {"test": data}
    if len(splits) == 1:
        return {"test": _table(next(iter(splits.values())), name, columns)}
    if "test" not in splits:
        other = next(split for split in splits if split != "train")
        raise TaskFileError(
            f"{name} must have a split called test, but has {', '.join(splits)}. Pass {{'train': {name}['train'], "
            f"'test': {name}[{other!r}]}}."
        )
    return {
        split: _table(splits[split], f"{name}[{split!r}]", columns) for split in ("train", "test") if split in splits
    }


def _table(data: Any, name: str, columns: Columns) -> Table:
    rows = [{str(column): _as_python(cell) for column, cell in row.items()} for row in _rows(data, name)]
    return Table(Path(name), "row", list(range(1, len(rows) + 1)), rows).renamed(columns)


def _rows(data: Any, name: str) -> Sequence[Mapping[Any, Any]]:
    if isinstance(data, list) and isinstance(data[0], Mapping):
        return data
    if isinstance(data, list):
        data = tuple(zip(*data, strict=True))
    if isinstance(data, tuple):
        data = dict(zip(("text", "label"), data, strict=True))
    if isinstance(data, Mapping):
        columns = {column: list(values) for column, values in data.items()}
        if len(set(map(len, columns.values()))) > 1:
            sizes = ", ".join(f"{len(values)} of {column}" for column, values in columns.items())
            raise TaskFileError(f"{name} must have columns of the same length, but has {sizes}.")
        return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    headers = list(getattr(data, "column_names", None) or data.columns)
    if (duplicate := next((column for column in headers if headers.count(column) > 1), None)) is not None:
        raise TaskFileError(f"{name} has two columns named {duplicate!r}. Rename or remove one.")
    method = next(method for method in _ROW_METHODS if hasattr(data, method))
    return getattr(data, method)(*_ROW_METHODS[method])  # type: ignore[no-any-return]


def _is_dict_of_data(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(map(is_data, value.values()))


def _is_frame(value: object) -> bool:
    is_table = hasattr(value, "columns") or hasattr(value, "column_names")
    return is_table and any(hasattr(value, method) for method in _ROW_METHODS)


def _is_column(value: object) -> bool:
    is_sequence = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return is_sequence and not isinstance(value, str | Mapping) and not _is_frame(value)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str)


def _as_python(cell: Any) -> Any:
    """Return the Python value of a NumPy scalar or array."""
    return cell.tolist() if hasattr(cell, "tolist") else cell
