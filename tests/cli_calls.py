"""Commands run in this process, and what they print read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import polars as pl
from typer.testing import CliRunner

from midlayer_encoders.cli import app


def run(*words: str) -> str:
    """Return what a command prints on a wide terminal; it must end well."""
    result = CliRunner().invoke(app, [*words], catch_exceptions=False, env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return result.output


def tables(output: str) -> list[list[list[str]]]:
    """Return the cells of each table in what was printed, its heading first."""
    found: list[list[list[str]]] = []
    for line in output.splitlines():
        if line.startswith("┏"):
            found.append([])
        elif line.startswith(("┃", "│")):
            found[-1].append([cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")])
    return found


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as a shell has them: ``{"max_length": 7, "half": True}`` is ``--max-length 7 --half``."""
    words: list[str] = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def check_every_option(
    command: Callable[[list[str]], Mapping[str, pl.DataFrame]],
    call: Callable[..., Mapping[str, pl.DataFrame]],
    options: Mapping[str, Any],
    *,
    required: Mapping[str, Any] | None = None,
) -> None:
    """Assert that a command with all options gives what the Python call gives, and that each of them matters.

    Were one option dropped or given to another, the command would give what the call gives without it, which differs.
    """
    base = dict(required or {})
    expected = call(**base, **options)
    given = command(words_of(base | options))
    for name, frame in expected.items():
        assert given[name].equals(frame), (name, given[name], frame)
    for left_out in options:
        fewer = call(**base, **{name: value for name, value in options.items() if name != left_out})
        assert not all(fewer[name].equals(frame) for name, frame in expected.items()), f"{left_out} changes nothing"
    if required is not None:
        plain = call(**base)
        given = command(words_of(base))
        for name, frame in plain.items():
            assert given[name].equals(frame), (name, given[name], frame)
