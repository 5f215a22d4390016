"""Run commands in this process and parse their output."""

from collections.abc import Callable, Mapping
from typing import Any

import polars as pl
from typer.testing import CliRunner

from midlayer_encoders.cli import app


def run(*arguments: str) -> str:
    """Return the output of a command on a wide terminal; the command must succeed."""
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False, env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return result.output


def tables(output: str) -> list[list[list[str]]]:
    """Return the cells of each printed table, its heading first."""
    result: list[list[list[str]]] = []
    for line in output.splitlines():
        if line.startswith("┏"):
            result.append([])
        elif line.startswith(("┃", "│")):
            result[-1].append([cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")])
    return result


def option_flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as command-line flags: ``{"max_length": 7, "half": True}`` is ``--max-length 7 --half``."""
    flags: list[str] = []
    for name, value in options.items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def check_every_option(
    command: Callable[[list[str]], Mapping[str, pl.DataFrame]],
    call: Callable[..., Mapping[str, pl.DataFrame]],
    options: Mapping[str, Any],
    *,
    plain: Mapping[str, Any],
    check_each: bool = True,
) -> None:
    """Assert that a command gives the same as the Python call, with all options and with ``plain`` ones.

    Each option must matter: if it were dropped or passed as another, the command would give the result of the call
    without it, which differs. ``check_each=False`` skips that check where it takes too long.
    """
    expected, plain_expected = call(**options), call(**plain)
    for subset, frames in ((options, expected), (plain, plain_expected)):
        outputs = command(option_flags(subset))
        for name, frame in frames.items():
            assert outputs[name].equals(frame), (name, outputs[name], frame)
    for used_options, frames in ((options, expected), (plain, plain_expected)) if check_each else ():
        for left_out in used_options:
            if used_options is plain and left_out in options:
                continue
            fewer = call(**{name: value for name, value in used_options.items() if name != left_out})
            assert not all(fewer[name].equals(frame) for name, frame in frames.items()), f"{left_out} changes nothing"
