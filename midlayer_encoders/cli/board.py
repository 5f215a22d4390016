"""``midlayer board``: many sweeps on one page, and the best encoder within a budget."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midlayer_encoders.cli import _output
from midlayer_encoders.cli._app import command
from midlayer_encoders.errors import OptionError

if TYPE_CHECKING:
    from midlayer_encoders.boards import Board

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


@command(
    "Find the layer",
    "midlayer board runs/one runs/two",
    "midlayer board runs --max-params 100M --max-ms 5",
    name="board",
    quiet=False,
)
def board_command(
    *,
    runs: Annotated[list[str], typer.Argument(help="Folders of sweeps (their --out), or folders that hold several.")],
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("midlayer-results/board.html"),
    max_params: Annotated[
        str | None, typer.Option(help="Maximum number of parameters of the encoder: 100M, 1.5B, 22000000.")
    ] = None,
    max_ms: Annotated[float | None, typer.Option(help="Maximum milliseconds per text.")] = None,
    max_bytes: Annotated[float | None, typer.Option(help="Maximum bytes per vector.")] = None,
) -> None:
    """Compare many sweeps on one page, score against cost, and print the best encoder within a budget."""
    from midlayer_encoders.boards import board
    from midlayer_encoders.frame.pareto import cost_text

    max_parameters = None if max_params is None else parse_amount(max_params)
    for flag, limit in (("--max-params", max_parameters), ("--max-ms", max_ms), ("--max-bytes", max_bytes)):
        if limit is not None and not 0 < limit < math.inf:
            raise OptionError(f"`{flag}` must be a finite number above 0, but got {limit:g}.")
    result = board(runs, max_parameters=max_parameters, max_milliseconds=max_ms, max_bytes=max_bytes)
    page = result.to_html(out)
    _print_table(result)
    for remark in result.remarks:
        _output.print_text(remark)
    _output.print_report(page)
    choice: dict[str, Any] | None = None
    try:
        point = result.chosen()
        lines = result.lines(point)
        choice = {"run": point.run, "layer": point.layer, "score": point.score, "costs": dict(point.costs)}
        choice["lines"] = lines
    finally:  # --json lists the runs even if none is within the budget
        _output.print_result(page=page, **result.to_dict(), chosen=choice)
    summary = f"Use {point.run} at layer {point.layer}: {point.score:.1f} points, {cost_text(point.costs)}."
    _output.print_text(summary, wrap=False)
    _output.print_encoder_lines(lines)


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


def _print_table(result: Board) -> None:
    """Print the best layer of each run."""
    from rich.text import Text

    from midlayer_encoders.frame.pareto import COSTS, amount

    tasks = f"{len(result.tasks)} shared tasks" if len(result.tasks) > 1 else result.tasks[0]
    columns = ("run", "layer", "score", "parameters", "ms per text", "bytes")
    table = _output.make_table(*columns, title=f"Best layer of each run on {tasks}", left=("run",))
    for run in result.runs:
        costs = (amount(run.best.costs[cost]) if cost in run.best.costs else "–" for cost in COSTS)
        layer = f"{run.best.layer} of {run.summary.num_layers}"
        table.add_row(Text(run.name, overflow="fold"), layer, f"{run.best.score:.1f}", *costs)
    _output.console().print(table)
