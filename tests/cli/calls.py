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
    plain: Mapping[str, Any],
    each: bool = True,
) -> None:
    """Assert that a command gives what the Python call gives, with all options and with ``plain`` ones.

    Each option must matter: were it dropped or given to another, the command would give what the call gives without it,
    which differs. ``each=False`` leaves that out where it takes too long; it was seen to hold for what is given here.
    """
    expected, few = call(**options), call(**plain)
    for some, frames in ((options, expected), (plain, few)):
        given = command(words_of(some))
        for name, frame in frames.items():
            assert given[name].equals(frame), (name, given[name], frame)
    for every, frames in ((options, expected), (plain, few)) if each else ():
        for left_out in every:
            if every is plain and left_out in options:
                continue
            fewer = call(**{name: value for name, value in every.items() if name != left_out})
            assert not all(fewer[name].equals(frame) for name, frame in frames.items()), f"{left_out} changes nothing"
