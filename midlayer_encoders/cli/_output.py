"""What commands print: lines, tables, and under ``--json`` one JSON object."""

import json
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from midlayer_encoders.cli._progress import prints_json
from midlayer_encoders.files import shell_path


def console() -> Console:
    """Return the console for human-readable output, which is silent under ``--json``."""
    return Console(quiet=prints_json())


def print_text(text: str, *, style: str | None = None, wrap: bool = True) -> None:
    """Print text; ``wrap=False`` keeps a line to copy in one piece."""
    console().print(text, style=style, highlight=False, markup=False, soft_wrap=not wrap)


def print_report(path: Path) -> None:
    """Print the path of a report."""
    print_text(f"The report: {shell_path(path)}", wrap=False)


def print_failures(failures: Mapping[str, str]) -> None:
    """Print each item that failed and its error."""
    for name, error in failures.items():
        print_text(f"{name} failed, {error}", style="bold red")


def print_encoder_lines(lines: Mapping[str, str], what: str = "it") -> dict[str, str]:
    """Print the command and the Python code that create an encoder; return command and expression for ``--json``."""
    from midlayer_encoders.report.labels import with_import

    print_text(f"Export {what}: {lines['shell']}", wrap=False)
    print_text(f"In Python:\n{with_import(lines['Python'])}", wrap=False)
    return {"shell": lines["shell"], "python": lines["Python"]}


def print_result(**values: Any) -> None:
    """Print the result of a command as one JSON object if ``--json`` was given; NaN and infinity become ``null``."""
    if prints_json():
        print(json.dumps(to_json(values), ensure_ascii=False, allow_nan=False), flush=True)  # noqa: T201


def to_json(value: Any) -> Any:
    """Return a value in the types of JSON.

    Example:
        >>> to_json({1: (float("nan"), 2.5)})
        {'1': [None, 2.5]}
    """
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def print_by_layer(cells: Mapping[tuple[int, str], str], *, title: str | None = None) -> None:
    """Print a table with a row for each layer and a column for each metric."""
    names = list(dict.fromkeys(name for _, name in cells))
    layers = sorted({layer for layer, _ in cells})
    rows = [[str(layer), *(cells.get((layer, name), "") for name in names)] for layer in layers]
    print_table(["layer", *(name.replace("_", " ") for name in names)], rows, title=title)  # spaces allow wrapping


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    bold: int | None = None,
    left: Collection[str] = (),
    sections: Collection[int] = (),
) -> None:
    """Print a table, split into several if its columns exceed the width of the terminal.

    Args:
        columns: headings, which may wrap between words.
        rows: cells; the first cell of a row is its label and appears in every part.
        title: title of the first part.
        bold: index of the highlighted row.
        left: columns of text: left-aligned, and wrapped between words.
        sections: indices of rows with a line above them.
    """

    def width(column: int) -> int:
        cells = [Text.from_markup(row[column]).plain for row in rows]
        words = [*columns[column].split(), *(" ".join(cells).split() if columns[column] in left else cells)]
        return max((len(word) for word in words), default=0) + 3  # a border, and a space on each side

    available = console().width - 1 - width(0)
    parts: list[list[int]] = [[]]
    for column in range(1, len(columns)):
        if parts[-1] and sum(map(width, [*parts[-1], column])) > available:
            parts.append([])
        parts[-1].append(column)
    for number, part in enumerate(parts):
        table = Table(title=None if number else title)
        natural = sum(max(width(column), len(columns[column]) + 3) for column in (0, *part))
        for column in (0, *part):
            if (heading := columns[column]) in left:
                table.add_column(heading, justify="left", overflow="fold")
                continue
            if natural >= console().width:  # rich would split words to make the columns equally wide
                heading = "\n".join(textwrap.wrap(heading, width(column) - 3))
            table.add_column(heading, justify="right", overflow="fold", no_wrap=column > 0)
        for index, row in enumerate(rows):
            if index in sections:
                table.add_section()
            table.add_row(row[0], *(row[column] for column in part), style="bold green" if index == bold else None)
        console().print(table)
