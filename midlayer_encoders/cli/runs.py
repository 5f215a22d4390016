"""``midlayer report`` and ``board``: the pages of finished sweeps."""

import re
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from midlayer_encoders.cli import _output
from midlayer_encoders.cli._app import command
from midlayer_encoders.errors import OptionError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


@command("Find the layer", quiet=False)
def report(folder: Annotated[Path, Argument(help="The --out of a sweep.")]) -> None:
    """Write the page of a sweep again from its results.

    Examples:
        midlayer report runs/reviews
        midlayer report runs/reviews --json
    """
    from midlayer_encoders.sweeping import SweepResult

    page = SweepResult.load(folder).to_html()
    _output.print_result(folder=folder, report=page)
    _output.print_report(page)


@command("Find the layer", name="board", quiet=False)
def board_command(
    *,
    runs: Annotated[list[str], Argument(help="Folders of sweeps (their --out), or folders that hold several.")],
    out: Annotated[Path, Option(help="Page to write.")] = Path("midlayer-results/board.html"),
    max_params: Annotated[str | None, Option(help="Maximum number of parameters: 100M, 1.5B, 22000000.")] = None,
    max_ms: Annotated[float | None, Option(help="Maximum milliseconds per text.")] = None,
    max_bytes: Annotated[float | None, Option(help="Maximum bytes per vector.")] = None,
) -> None:
    """Compare many sweeps on one page, score against cost, and print the best encoder within a budget.

    Examples:
        midlayer board runs/one runs/two
        midlayer board runs --max-params 100M --max-ms 5
    """
    from midlayer_encoders.boards import board

    max_parameters = None if max_params is None else parse_amount(max_params)
    result = board(runs, max_parameters=max_parameters, max_milliseconds=max_ms, max_bytes=max_bytes)
    _output.print_board(result, out)


def parse_amount(text: str) -> float:
    """Return a number from a word with an optional unit.

    Example:
        >>> parse_amount("100M"), parse_amount("1.5B"), parse_amount("22_000_000")
        (100000000.0, 1500000000.0, 22000000.0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmbg]?)", text.strip().replace("_", "").lower())
    if match is None:
        raise OptionError(f"`--max-params` must be a number such as 100M, 1.5B or 22000000, but got {text!r}.")
    return float(match[1]) * _UNITS[match[2]]
