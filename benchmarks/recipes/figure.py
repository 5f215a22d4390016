"""Draw the figures of docs/recipes.md and of the README from ``results/``: ``python -m benchmarks.recipes.figure``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from benchmarks.panels import Dots, Level, Line, Panel, Word, draw, layer_axis, value_axis
from benchmarks.zoo import table as zoo
from midlayer_encoders.frame.summaries import Curve, summary
from midlayer_encoders.report.layer_charts import plot_recipes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
SHOWN = ("plain", "plain+last", "one-word", "one-word+mean", "one-word+filter", "echo")


SHOWN_GAIN = {"plain": "the plain text", "word-echo": "the prompt word-echo, two spans"}
FIGURES = HERE.parents[1] / "docs" / "figures"


def averages(name: str, recipes: tuple[str, ...]) -> dict[str, Curve]:
    """Return the mean over the tasks at every layer, by recipe."""
    frame = pl.read_csv(HERE / "results" / f"{name}.csv").filter(pl.col("kind") == "score")
    found = {recipe: summary(frame.filter(pl.col("recipe") == recipe).drop("recipe")).average for recipe in recipes}
    return {recipe: curve for recipe, curve in found.items() if curve is not None}


def gain() -> Figure:
    """Return the README's picture: the last layer, a better one, and `word-echo` with two spans, on two models."""
    made = zoo.means("all-MiniLM-L6-v2")
    minilm = made["plain", max(layer for _, layer in made)]
    panels = []
    for model in zoo.CAUSAL[:2]:
        scores = zoo.means(model)
        last = max(layer for _, layer in scores)
        curves = {name: {k: scores[name, k] for k in range(last + 1) if (name, k) in scores} for name in SHOWN_GAIN}
        plain, prompted = curves.values()
        chosen = zoo.resolve_layer(zoo.DEPTH, last)
        best = max(plain, key=plain.__getitem__)
        lines = [
            Line(tuple(curve), tuple(curve.values()), label, style)
            for style, (label, curve) in enumerate(zip(SHOWN_GAIN.values(), curves.values(), strict=True))
        ]
        places = [(best, plain[best], 0, "best layer", 3.2), (last, plain[last], 0, "last layer", -3.6)]
        places.append((chosen, prompted[chosen], 1, "depth 0.95:", 2.2))
        dots = [Dots((layer,), (value,), style=style) for layer, value, style, _, _ in places]
        words = [
            Word(layer - 0.12 * last if layer == best else 0.72 * last, value + up, f"{word} {value:.1f}", style)
            for layer, value, style, word, up in places
        ]
        level = Level(minilm, f"{minilm:.1f}", f"all-MiniLM-L6-v2, made for embeddings: {minilm:.1f}")
        parts = (*lines, *dots, level, *words)
        axis = value_axis(parts, label="mean score on six tasks")
        panels.append(Panel(f"{model}, {last} blocks", layer_axis(last, room=1.5), axis, parts))
    return draw(panels, columns=2, size=(5.2, 3.4))


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
