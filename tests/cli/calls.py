"""Run commands in this process and parse their output."""

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
    result: list[list[list[str]]] = []
    for line in output.splitlines():
        if line.startswith("┏"):
            result.append([])
        elif line.startswith(("┃", "│")):
            result[-1].append([cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")])
    return result


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
    for subset, frames in ((options, expected), (plain, few)):
        outputs = command(words_of(subset))
        for name, frame in frames.items():
            assert outputs[name].equals(frame), (name, outputs[name], frame)
    for used_options, frames in ((options, expected), (plain, few)) if each else ():
        for left_out in used_options:
            if used_options is plain and left_out in options:
                continue
            fewer = call(**{name: value for name, value in used_options.items() if name != left_out})
            assert not all(fewer[name].equals(frame) for name, frame in frames.items()), f"{left_out} changes nothing"
