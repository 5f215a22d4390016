"""Draw the figures of docs/recipes.md and of the README from ``results/``: ``python -m benchmarks.recipes.figure``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from benchmarks.panels import Dots, Level, Line, Panel, Word, draw, layer_axis, value_axis
from benchmarks.zoo import rival_tables as rivals
from benchmarks.zoo import table as zoo
from midlayer_encoders.frame.summaries import Curve, summary
from midlayer_encoders.report.layer_charts import plot_recipes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
SHOWN = ("plain", "plain+last", "one-word", "one-word+mean", "one-word+filter", "echo")


SHOWN_GAIN = {
    "plain": "the plain text",
    "plain centered": "the plain text, centered",
    rivals.DEFAULT: "the prompt word-echo, centered",
}
FIGURES = HERE.parents[1] / "docs" / "figures"


def averages(name: str, recipes: tuple[str, ...]) -> dict[str, Curve]:
    """Return the mean over the tasks at every layer, by recipe."""
    frame = pl.read_csv(HERE / "results" / f"{name}.csv").filter(pl.col("kind") == "score")
    found = {recipe: summary(frame.filter(pl.col("recipe") == recipe).drop("recipe")).average for recipe in recipes}
    return {recipe: curve for recipe, curve in found.items() if curve is not None}


def gain() -> Figure:
    """Return the README's picture: the last layer, a better one, and the default prompt, on short texts and on passages."""
    made = zoo.means("all-MiniLM-L6-v2")
    minilm = made["plain", max(layer for _, layer in made)]
    of, panels = rivals.results(zoo.CAUSAL[0]), []
    last = of.num_layers
    for group, title in {rivals.SHORT: "six tasks of short texts", "passages": "passages of XQuAD"}.items():
        tasks = rivals.GROUPS[group]
        curves = {name: {k: of.mean(tasks, (name, k)) for k in range(last + 1)} for name in SHOWN_GAIN}
        lines = [
            Line(tuple(curve), tuple(curve.values()), label, style)
            for style, (label, curve) in enumerate(zip(SHOWN_GAIN.values(), curves.values(), strict=True))
        ]
        places = [
            (*of.best(tasks, "plain"), "best layer", 3.2),
            ("plain", last, "last layer", -3.6),
            (*of.default, "depth 0.95:", 1.3),
        ]
        styles = list(SHOWN_GAIN)
        dots = [Dots((layer,), (curves[name][layer],), style=styles.index(name)) for name, layer, _, _ in places]
        words = [
            Word(
                layer - 0.12 * last if word.startswith("best") else 0.72 * last,
                curves[name][layer] + up * (1 if group == rivals.SHORT or word == "best layer" else 2.2),
                f"{word} {curves[name][layer]:.1f}",
                styles.index(name),
            )
            for name, layer, word, up in places
        ]
        parts = [*lines, *dots, *words]
        if group == rivals.SHORT:
            parts.append(Level(minilm, f"{minilm:.1f}", f"all-MiniLM-L6-v2, made for embeddings: {minilm:.1f}"))
        axis = value_axis(parts, label="mean score" if group == rivals.SHORT else "nDCG@10")
        panels.append(Panel(f"SmolLM2-135M, {title}", layer_axis(last, room=1.5), axis, tuple(parts)))
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
