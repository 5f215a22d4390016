"""Labelled examples from disk: a folder for each class, or a file with a class in each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midlayer_encoders.errors import OptionError, did_you_mean, short_repr
from midlayer_encoders.files import exists, expand_home, read_text_file
from midlayer_encoders.media import media_files
from midlayer_encoders.tasks.table_files import SUFFIXES, Table, is_label, is_text, read_table

__all__ = ["Examples", "check_path", "read_examples"]


@dataclass(frozen=True)
class Examples:
    """What to pass through a model, and the class of each.

    Attributes:
        inputs: texts, or paths of images or audio files.
        labels: one class each.
    """

    inputs: list[Any]
    labels: list[str]


def read_examples(path: Path | str, media: Sequence[str], *, bad: str = "refuse") -> Examples:
    """Return the labeled examples of a folder of class folders, or of a table with the column ``label``.

    A class folder holds images, audio files, or texts as ``.txt`` files, as the model takes them. A table (JSONL, CSV
    or parquet) has a ``text`` in each row, or the ``path`` of an image or audio file, relative to the table.

    Args:
        path: the folder or file.
        media: what the model takes, of ``"text"``, ``"image"`` and ``"audio"``.
        bad: ``"refuse"`` raises at a file that cannot be read; ``"skip"`` leaves it out and names it in the log.
    """
    where = check_path(path)
    if not where.is_dir():
        return _of_table(read_table(where))
    folders = sorted(folder for folder in where.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if len(folders) < 2:
        raise OptionError(
            f"`data` must be a folder with a folder for each class, at least two, but {where} has {len(folders)}"
            f"{f' ({folders[0].name})' if folders else ''}."
        )
    found = {folder.name: _of_folder(folder, media, bad) for folder in folders}
    return Examples(
        [item for items in found.values() for item in items], [name for name, items in found.items() for _ in items]
    )


def check_path(path: Path | str) -> Path:
    """Return where examples lie, or raise an :class:`OptionError` where there is nothing."""
    where = expand_home(path)
    if not exists(where):
        raise OptionError(
            f"`data` must be a folder with a folder for each class, or a file ({', '.join(SUFFIXES)}), "
            f"but there is nothing at {short_repr(str(where), 200)}."
        )
    return where


def _of_folder(folder: Path, media: Sequence[str], bad: str) -> list[Any]:
    if "text" in media and (texts := sorted(folder.rglob("*.txt"))):
        return [read_text_file(path, OptionError).strip() for path in texts]
    medium = "image" if "image" in media else "audio" if "audio" in media else None
    if medium is None:
        raise OptionError(f"`data` must hold .txt files for a model of texts, but {folder} has none.")
    return [str(path) for path in media_files(folder, medium, bad=bad)]  # type: ignore[arg-type]


def _of_table(table: Table) -> Examples:
    column = next((name for name in ("text", "path") if name in table.columns), None)
    for name, seen in (("text", column is not None), ("label", "label" in table.columns)):
        if not seen:
            raise OptionError(
                f"`data` must have the columns label and text (or path), but {table.path.name} lacks {name!r}: it has "
                f"{', '.join(table.columns)}.{did_you_mean(name, table.columns)}"
            )
    for number, row in zip(table.numbers, table.rows, strict=True):
        for name, kind, good in ((str(column), "a string", is_text), ("label", "a string or a whole number", is_label)):
            if not good(row.get(name)):
                raise OptionError(
                    f"{table.path.name}, {table.unit} {number}: {name!r} must be {kind} that is not empty, but got "
                    f"{short_repr(row.get(name))}."
                )
    labels = [str(row["label"]) for row in table.rows]
    if column == "text":
        return Examples([str(row["text"]) for row in table.rows], labels)
    return Examples([str(table.path.parent / str(row["path"])) for row in table.rows], labels)
