"""``midlayer board``: many sweeps on one page, and the best encoder within a budget."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from midlayer_encoders.cli import _output
from midlayer_encoders.cli._app import command
from midlayer_encoders.errors import OptionError

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
    runs: Annotated[list[str], Argument(help="Folders of sweeps (their --out), or folders that hold several.")],
    out: Annotated[Path, Option(help="Page to write.")] = Path("midlayer-results/board.html"),
    max_params: Annotated[str | None, Option(help="Maximum number of parameters: 100M, 1.5B, 22000000.")] = None,
    max_ms: Annotated[float | None, Option(help="Maximum milliseconds per text.")] = None,
    max_bytes: Annotated[float | None, Option(help="Maximum bytes per vector.")] = None,
) -> None:
    """Compare many sweeps on one page, score against cost, and print the best encoder within a budget."""
    from rich.markup import escape

    from midlayer_encoders.boards import board
    from midlayer_encoders.frame.pareto import COSTS, amount, cost_text

    max_parameters = None if max_params is None else parse_amount(max_params)
    result = board(runs, max_parameters=max_parameters, max_milliseconds=max_ms, max_bytes=max_bytes)
    page = result.to_html(out)
    tasks = f"{len(result.tasks)} shared tasks" if len(result.tasks) > 1 else result.tasks[0]
    rows = []
    for run in result.runs:
        costs = (amount(run.best.costs[cost]) if cost in run.best.costs else "–" for cost in COSTS)
        layer = f"{run.best.layer} of {run.summary.num_layers}"
        rows.append([escape(run.name), layer, f"{run.best.score:.1f}", *costs])
    columns = ["run", "layer", "score", "parameters", "ms per text", "bytes"]
    _output.print_table(columns, rows, title=f"Best layer of each run on {tasks}", left=("run",))
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
