"""Draw the figure of docs/recipes.md from ``results/smollm2.csv``: ``python -m benchmarks.recipes.figure``."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from midlayer_encoders.frame import summary
from midlayer_encoders.report.recipes import plot_recipes

HERE = Path(__file__).parent
SHOWN = ("plain", "plain+last", "one-word", "one-word+mean", "one-word+filter", "summarize", "echo")


def main() -> None:
    frame = pl.read_csv(HERE / "results" / "smollm2.csv")
    found = {
        name: summary(frame.filter(pl.col("recipe") == name, pl.col("kind") == "score").drop("recipe"))
        for name in SHOWN
    }
    plot_recipes(found).savefig(HERE.parents[1] / "docs" / "figures" / "recipes_smollm2.png", dpi=110)


if __name__ == "__main__":
    main()
