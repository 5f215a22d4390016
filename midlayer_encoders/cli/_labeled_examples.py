"""Read labeled examples from a folder of class folders or from a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midlayer_encoders.errors import OptionError, did_you_mean, short_repr
from midlayer_encoders.files import exists, expand_home, read_text_file
from midlayer_encoders.reading.media_inputs import media_files
from midlayer_encoders.tasks.file_tasks import column_cure
from midlayer_encoders.tasks.table_files import LABEL, SUFFIXES, TEXT, USUAL_NAMES, Columns, Table, read_table


def read_examples(
    path: Path | str, media: Sequence[str], *, bad: str = "refuse", columns: Columns = USUAL_NAMES
) -> tuple[list[Any], list[str]]:
    """Return the inputs and labels of a folder of class folders, or of a table with the column ``label``.

    A class folder holds images, audio files or ``.txt`` files, depending on the model. A table (JSONL, CSV or parquet)
    has a ``text`` in each row, or the ``path`` of an image or audio file, relative to the table.

    Args:
        path: folder or file.
        media: input types of the model, of ``"text"``, ``"image"`` and ``"audio"``.
        bad: ``"refuse"`` raises for an unreadable file; ``"skip"`` leaves it out and logs its name.
        columns: names of a table's columns.
    """
    path = check_examples_path(path)
    if not path.is_dir():
        return _examples_in_table(read_table(path, columns))
    if any(columns):
        names = "`text_column`, `label_column` and `drop_empty`"
        raise OptionError(f"{names} do not apply to a folder, but {path} is one.")
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if len(folders) < 2:
        raise OptionError(
            f"`data` must be a folder with a folder for each class, at least two, but {path} has {len(folders)}"
            f"{f' ({folders[0].name})' if folders else ''}."
        )
    classes = {folder.name: _inputs_in_folder(folder, media, bad) for folder in folders}
    labels = [name for name, inputs in classes.items() for _ in inputs]
    return [example for inputs in classes.values() for example in inputs], labels


def check_examples_path(path: Path | str) -> Path:
    """Return the path of labeled examples, or raise an :class:`OptionError` if it does not exist."""
    resolved = expand_home(path)
    if not exists(resolved):
        raise OptionError(
            f"`data` must be a folder with a folder for each class, or a file ({', '.join(SUFFIXES)}), "
            f"but {short_repr(str(resolved), 200)} does not exist."
        )
    return resolved


def _inputs_in_folder(folder: Path, media: Sequence[str], bad: str) -> list[Any]:
    if "text" in media and (texts := sorted(folder.rglob("*.txt"))):
        return [read_text_file(path, OptionError).strip() for path in texts]
    medium = next((medium for medium in ("image", "audio") if medium in media), None)
    if medium is None:
        raise OptionError(f"`data` must hold .txt files for a text model, but {folder} has none.")
    return [str(path) for path in media_files(folder, medium, bad=bad)]  # type: ignore[arg-type]


def _examples_in_table(table: Table) -> tuple[list[Any], list[str]]:
    columns = table.columns
    column = "path" if "path" in columns and "text" not in columns else "text"
    for name in (column, "label"):
        if name not in columns:
            raise OptionError(
                f"`data` must have the columns label and text (or path), but {table.path.name} lacks {name!r}: it has "
                f"{', '.join(columns)}.{did_you_mean(name, columns) or f' {column_cure(table)}'}".rstrip()
            )
    rules = {column: TEXT, "label": LABEL}
    table = table.complete(*rules)
    inputs, labels = table.checked(rules)
    if column == "path":
        inputs = [str(table.path.parent / path) for path in inputs]
    return inputs, [str(label) for label in labels]
