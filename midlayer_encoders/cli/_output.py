"""What commands print: sentences, tables, and under ``--json`` one JSON object."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Exit

from midlayer_encoders.cli._progress import prints_json
from midlayer_encoders.files import shell_path


def print_text(text: str, *, style: str | None = None, wrap: bool = True) -> None:
    """Print text; ``wrap=False`` keeps a line to copy in one piece."""
    _console().print(text, style=style, highlight=False, markup=False, soft_wrap=not wrap)


def print_outcome(
    sentences: Sequence[str] = (),
    *,
    failures: Mapping[str, str] | None = None,
    report: Path | None = None,
    lines: Mapping[str, str] | None = None,
    what: str = "it",
    **values: Any,
) -> None:
    """Print what a command found, or under ``--json`` one object; exit with 1 if something failed.

    Args:
        sentences: a line each.
        failures: errors by what failed.
        report: path of the page.
        lines: code that creates an encoder, by language.
        what: what the lines export.
        values: values of the object.
    """
    from midlayer_encoders.report.labels import with_import

    export = None if lines is None else {"shell": lines["shell"], "python": lines["Python"]}
    print_json(report=report, failures=failures, export=export, **values)
    for sentence in sentences:
        print_text(sentence)
    for name, error in (failures or {}).items():
        print_text(f"{name} failed, {error}", style="bold red")
    if report is not None:
        print_text(f"The report: {shell_path(report)}", wrap=False)
    if lines is not None:
        print_text(f"Export {what}: {lines['shell']}\nIn Python:\n{with_import(lines['Python'])}", wrap=False)
    if failures:
        raise Exit(1)


def print_json(**values: Any) -> None:
    """Print values as one JSON object if ``--json`` was given; NaN and infinity become ``null``."""
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


def print_layers(columns: Mapping[str, dict[int | str, str]], title: str, *, best: int | None = None) -> None:
    """Print a table with a row for each layer, and below them rows with names, such as baselines.

    Args:
        columns: texts of a column by layer or name, by heading.
        title: of the table.
        best: layer to highlight.
    """
    from midlayer_encoders.report.pages import layer_rows

    head, *rows = layer_rows(columns)
    print_table([[name.replace("_", " ") for name in head], *rows], title, best=str(best))


def print_table(rows: Sequence[Sequence[str]], title: str, *, best: str = "", left: Collection[str] = ()) -> None:
    """Print a table, split into several if its columns exceed the width of the terminal.

    Args:
        rows: headings, which may wrap between words, and cells; the first cell of a row appears in every part.
        title: title of the first part.
        best: first cell of the highlighted row.
        left: columns of text: left-aligned, and wrapped between words.
    """
    head, *body = rows

    def width(column: int) -> int:
        cells = [row[column] for row in body]
        words = [*head[column].split(), *(" ".join(cells).split() if head[column] in left else cells)]
        return max(map(len, words), default=0)

    parts: list[list[int]] = [[0]]
    for column in range(1, len(head)):
        if len(parts[-1]) > 1 and 1 + sum(width(shown) + 3 for shown in (*parts[-1], column)) > _console().width:
            parts.append([0])
        parts[-1].append(column)
    for number, part in enumerate(parts):
        table = Table(title=None if number else Text(title))
        for column in part:
            justify: Any = "left" if head[column] in left else "right"
            table.add_column(head[column], justify=justify, overflow="fold", min_width=width(column))
        for row in body:
            table.add_row(*(Text(row[column]) for column in part), style="bold green" if row[0] == best else None)
        _console().print(table)


def _console() -> Console:
    """Return the console for human-readable output, which is silent under ``--json``."""
    return Console(quiet=prints_json())
