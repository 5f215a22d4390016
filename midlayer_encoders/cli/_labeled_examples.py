"""Read labeled examples from a folder of class folders or from a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import expand_home, read_text_file
from midlayer_encoders.reading.media_inputs import media_files
from midlayer_encoders.tasks.tables import COLUMN_CURE, LABEL, TEXT, USUAL_NAMES, Columns, read_table
from midlayer_encoders.validation import check_effect


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
    path = expand_home(path)
    if not path.is_dir():
        return _examples_in_table(path, columns)
    check_effect(Columns, "for a folder of class folders", **columns._asdict())
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if len(folders) < 2:
        names = ", ".join(folder.name for folder in folders) or "none"
        raise OptionError(
            f"`data` must be a folder with at least two folders, one for each class, but {path} has {names}."
        )
    classes = {folder.name: _inputs_in_folder(folder, media, bad) for folder in folders}
    labels = [name for name, inputs in classes.items() for _ in inputs]
    return [example for inputs in classes.values() for example in inputs], labels


def _inputs_in_folder(folder: Path, media: Sequence[str], bad: str) -> list[Any]:
    if "text" in media and (texts := sorted(folder.rglob("*.txt"))):
        return [read_text_file(path, OptionError).strip() for path in texts]
    medium: Any = next((medium for medium in ("image", "audio") if medium in media), None)
    if medium is None:
        raise OptionError(f"`data` must hold .txt files for a text model, but {folder} has none.")
    return [str(path) for path in media_files(folder, medium, bad=bad)]


def _examples_in_table(path: Path, columns: Columns) -> tuple[list[Any], list[str]]:
    table = read_table(path, columns)
    cure = f" {COLUMN_CURE}"
    rules = {table.column("text", "path", cure=cure): TEXT, table.column("label", cure=cure): LABEL}
    inputs, labels = table.complete(*rules).check_columns(rules)
    if "path" in rules:
        inputs = [str(path.parent / name) for name in inputs]
    return inputs, [str(label) for label in labels]
