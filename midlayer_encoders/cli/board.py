"""``midlayer board``: many sweeps on one page, and the encoder to use under a budget."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midlayer_encoders.cli._app import app, console, make_table, print_report
from midlayer_encoders.cli._progress import json_result, print_result
from midlayer_encoders.errors import OptionError

if TYPE_CHECKING:
    from midlayer_encoders.boards import Board
    from midlayer_encoders.frame.pareto import Point

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


@app.command("board")
@json_result
def board_command(
    *,
    runs: Annotated[list[str], typer.Argument(help="Folders of sweeps (their --out), or folders that hold several.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("midlayer-results/board.html"),
    max_params: Annotated[
        str | None, typer.Option(help="Most parameters of the encoder to use: 100M, 1.5B, 22000000.")
    ] = None,
    max_ms: Annotated[float | None, typer.Option(help="Most milliseconds per text of it.")] = None,
    max_bytes: Annotated[float | None, typer.Option(help="Most bytes per vector of it.")] = None,
) -> None:
    """Show many sweeps on one page: the best layer of each, score against cost; print the encoder for a budget."""
    from midlayer_encoders.boards import board

    most = None if max_params is None else parse_amount(max_params)
    for flag, given in (("--max-params", most), ("--max-ms", max_ms), ("--max-bytes", max_bytes)):
        if given is not None and not 0 < given < math.inf:
            raise OptionError(f"`{flag}` must be a finite number above 0, but got {given:g}.")
    found = board(runs, max_parameters=most, max_milliseconds=max_ms, max_bytes=max_bytes)
    page = found.to_html(out)
    _print_table(found)
    for remark in found.remarks:
        console().print(remark, highlight=False, markup=False)
    print_report(page)
    chosen: dict[str, Any] | None = None
    try:
        point = found.chosen()
        made = {"run": point.run, "layer": point.layer, "score": point.score, "costs": dict(point.costs)}
        chosen = {**made, "lines": found.lines(point)}
    finally:  # the runs are for a program also where none is within the budget
        print_result(page=page, **found.to_dict(), chosen=chosen)
    _print_chosen(found, point)


def parse_amount(text: str) -> float:
    """Return a number from a shell's word, with or without a unit.

    Example:
        >>> parse_amount("100M"), parse_amount("1.5B"), parse_amount("22_000_000")
        (100000000.0, 1500000000.0, 22000000.0)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmbg]?)", text.strip().replace("_", "").lower())
    if found is None:
        raise OptionError(f"`--max-params` must be a number such as 100M, 1.5B or 22000000, but got {text!r}.")
    return float(found[1]) * _UNITS[found[2]]


def _print_table(found: Board) -> None:
    """Print the best layer of each run."""
    from rich.text import Text

    from midlayer_encoders.frame.pareto import COSTS, amount

    on = f"{len(found.tasks)} shared tasks" if len(found.tasks) > 1 else found.tasks[0]
    head = ("run", "layer", "score", "parameters", "ms per text", "bytes")
    table = make_table(*head, title=f"Best layer of each run on {on}", left=("run",))
    for run in found.runs:
        costs = (amount(run.best.costs[cost]) if cost in run.best.costs else "–" for cost in COSTS)
        layer = f"{run.best.layer} of {run.summary.num_layers}"
        table.add_row(Text(run.name, overflow="fold"), layer, f"{run.best.score:.1f}", *costs)
    console().print(table)


def _print_chosen(found: Board, point: Point) -> None:
    """Print the encoder to use and the lines that make it."""
    from midlayer_encoders.frame.pareto import cost_text

    words = f"Use {point.run} at layer {point.layer}: {point.score:.1f} points, {cost_text(point.costs)}."
    console().print(words, soft_wrap=True, highlight=False, markup=False)
    lines = found.lines(point)
    console().print("Export it:", lines["shell"], soft_wrap=True, highlight=False, markup=False)
    console().print("In Python:", lines["Python"], soft_wrap=True, highlight=False, markup=False)
