"""Draw the board of docs/board.md from the scores in ``results/``, and write what the command prints into the page.

    python -m benchmarks.zoo.board [--page board.html]

No model is run: the scores become folders of sweeps, and ``midlayer board`` compares them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import polars as pl
from typer.testing import CliRunner

from benchmarks.pages import write_part
from benchmarks.zoo.table import FOLDER
from midlayer_encoders.cli import app
from midlayer_encoders.extras.boards import Board, board
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.report.drawing import write_figure
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.best_layer import Notes

DOCS = FOLDER.parents[1] / "docs"
BUDGET = "100M"
_BERT = (12_066_432, 1_774_464)
# Name on the Hub, parameters at layer 0 (embeddings, final norm and pooler), parameters of a block, and recipes.
MODELS: dict[str, tuple[str, tuple[int, int], tuple[str, ...]]] = {
    "SmolLM2-135M": ("HuggingFaceTB/SmolLM2-135M-Instruct", (28_312_128, 3_540_096), ("plain", "word-echo")),
    "Gemma-3-270M": ("google/gemma-3-270m", (167_772_800, 5_573_632), ("plain", "word-echo")),
    "all-MiniLM-L6-v2": ("sentence-transformers/all-MiniLM-L6-v2", _BERT, ("plain",)),
    "paraphrase-MiniLM-L3": ("sentence-transformers/paraphrase-MiniLM-L3-v2", _BERT, ("plain",)),
}


def write_sweeps(folder: Path) -> None:
    """Write a sweep for each model and recipe, with the parameters of each layer as its only cost."""
    for name, (model, (first, block), recipes) in MODELS.items():
        scores = pl.read_csv(FOLDER / "results" / f"{name}.csv")
        last = max(scores["layer"])
        for recipe in recipes:
            rows = [
                (name, "default", layer, layer / last, "score", task, "main_score", score / 100)
                for layer, task, score in scores.filter(recipe=recipe).select("layer", "task", "score").iter_rows()
            ]
            notes = Notes(
                f"Every layer of {name}",
                model,
                {"weights": model},
                parameters={layer: first + layer * block for layer in range(last + 1)},
                options={} if recipe == "plain" else {"recipe": recipe},
            )
            SweepResult(
                pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"), folder / f"{name}-{recipe}", notes
            ).save()


def compare(folder: Path) -> tuple[Board, str]:
    """Return the board of the sweeps in a folder, and the lines about the encoder that the command prints."""
    arguments = ["board", str(folder), "--max-params", BUDGET, "--out", str(folder / "board.html")]
    output = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "400"}).output
    below = [line for line in output.rpartition("┘\n")[2].splitlines() if not line.startswith("The report: ")]
    lines = "\n".join(below).strip()
    return board(folder, max_parameters=100e6), lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="where to write the page, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_sweeps(Path(name))
        result, lines = compare(Path(name))
        write_figure(result.plot(), DOCS / "figures" / "board.png", dpi=110)
        write_part(DOCS / "board.md", "printed", f"```text\n{lines}\n```\n")
        if args.page is not None:
            result.to_html(args.page)


if __name__ == "__main__":
    main()
