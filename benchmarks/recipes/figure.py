"""Draw the figures of docs/recipes.md and of the README from ``results/``: ``python -m benchmarks.recipes.figure``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from benchmarks.panels import Dots, Level, Line, Panel, Word, draw, layer_axis, value_axis
from midlayer_encoders.frame.summaries import Curve, summary
from midlayer_encoders.report.layer_charts import plot_recipes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
SHOWN = ("plain", "plain+last", "one-word", "one-word+mean", "one-word+filter", "echo")


FIGURES = HERE.parents[1] / "docs" / "figures"


def averages(name: str, recipes: tuple[str, ...]) -> dict[str, Curve]:
    """Return the mean over the tasks at every layer, by recipe."""
    frame = pl.read_csv(HERE / "results" / f"{name}.csv").filter(pl.col("kind") == "score")
    found = {recipe: summary(frame.filter(pl.col("recipe") == recipe).drop("recipe")).average for recipe in recipes}
    return {recipe: curve for recipe, curve in found.items() if curve is not None}


def gain() -> Figure:
    """Return the README's picture: the last layer, a better one, a better question, and a model made for embeddings."""
    plain, asked = averages("smollm2", ("plain", "one-word")).values()
    made = averages("minilm", ("plain",))["plain"].last
    lines = [
        Line(tuple(curve.points), tuple(curve.points.values()), label, style)
        for style, (label, curve) in enumerate(
            {"the plain text": plain, "asked for its meaning in one word": asked}.items()
        )
    ]
    places = [(plain.best_layer, plain.best, 0), (plain.last_layer, plain.last, 0), (asked.best_layer, asked.best, 1)]
    dots = [Dots((layer,), (value,), style=style) for layer, value, style in places]
    told = (("best layer", -2.4, 3.0), ("last layer", -2.9, -3.2), ("best layer", -2.9, 3.2))  # where there is room
    words = [
        Word(layer + right, value + up, f"{word} {value:.1f}")
        for (layer, value, _), (word, right, up) in zip(places, told, strict=True)
    ]
    level = Level(made, f"{made:.1f}", f"all-MiniLM-L6-v2, made for embeddings: {made:.1f}")
    parts = (*lines, *dots, level, *words)
    panel = Panel(
        "SmolLM2-135M: mean score on six tasks, by layer",
        layer_axis(plain.last_layer, room=1.5),
        value_axis(parts),
        parts,
    )
    return draw([panel], size=(7.2, 3.4))


def main() -> None:
    frame = pl.read_csv(HERE / "results" / "smollm2.csv")
    found = {
        name: summary(frame.filter(pl.col("recipe") == name, pl.col("kind") == "score").drop("recipe"))
        for name in SHOWN
    }
    plot_recipes(found).savefig(FIGURES / "recipes_smollm2.png", dpi=110)
    gain().savefig(FIGURES / "gain.png", dpi=110)


if __name__ == "__main__":
    main()
