"""Recipe and layer without labels: what each default costs, from sweeps over recipes. Writes its part of ``README.md``.

    python -m benchmarks.selection.recipes causal=runs/recipes/smollm2.csv tuned=runs/recipes/minilm.csv

Each argument is a kind of model (as in ``midlayer_encoders/selection/select.py``) and the frame of ``sweep(model, tasks,
recipes=…)`` on one model of that kind. A default is a recipe and a depth; its regret is the best score of any recipe and layer, averaged
over the tasks, minus its own. What is fitted is fitted on the other models, or on the other tasks of the same model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.selection.run import write_part
from benchmarks.zoo.table import REMOVED
from midlayer_encoders.frame.curves import ByLayer, curves_by_dataset, mean_curve
from midlayer_encoders.frame.schema import number_of_layers
from midlayer_encoders.recipes import recipe_of
from midlayer_encoders.selection.select import ModelKind, default_depth, default_recipe

DEPTHS = [place / 20 for place in range(10, 21)]


@dataclass(frozen=True)
class Swept:
    """A model of which every layer was scored under every recipe, in points."""

    name: str
    kind: ModelKind
    num_layers: int
    tasks: Mapping[str, Mapping[str, ByLayer]]  # by recipe and task

    def curve(self, recipe: str, tasks: Sequence[str] | None = None) -> ByLayer:
        """Return the mean over tasks, of the layers that were scored on all of them."""
        return mean_curve([curve for task, curve in self.tasks[recipe].items() if tasks is None or task in tasks])

    def at(self, recipe: str, depth: float, tasks: Sequence[str] | None = None) -> float:
        return self.curve(recipe, tasks)[round(depth * self.num_layers)]

    def best(self, tasks: Sequence[str] | None = None) -> tuple[float, str, int]:
        """Return the highest mean of any recipe and layer, and which."""
        return max(
            (score, recipe, layer) for recipe in self.tasks for layer, score in self.curve(recipe, tasks).items()
        )

    @property
    def names(self) -> list[str]:
        return list(next(iter(self.tasks.values())))


def read(kind: str, path: Path) -> Swept:
    frame = pl.read_csv(path).filter(kind="score").with_columns(pl.col("value") * 100)
    tasks = {str(recipe): curves_by_dataset(part) for (recipe,), part in frame.group_by("recipe", maintain_order=True)}
    tasks = {recipe: curves for recipe, curves in tasks.items() if recipe.partition("+")[0] not in REMOVED}
    return Swept(frame["model"][0].split("/")[-1], kind, number_of_layers(frame), tasks)  # type: ignore[arg-type]


def fitted(models: Sequence[Swept], recipes: Iterable[str], tasks: Sequence[str] | None = None) -> tuple[str, float]:
    """Return the recipe and the depth with the smallest mean regret over some models and tasks."""
    regret = {
        (recipe, depth): np.mean([one.best(tasks)[0] - one.at(recipe, depth, tasks) for one in models])
        for recipe in recipes
        for depth in DEPTHS
    }
    return min(regret, key=lambda one: (round(float(regret[one]), 9), one[1]))


def by_kind(one: Swept) -> tuple[str, float]:
    """Return what ``select_layer(…, recipes="all")`` takes without labels."""
    every = [recipe_of("recipe", name) for name in one.tasks if "+" not in name]
    chosen = default_recipe(every, one.kind)
    return chosen.name, default_depth(chosen, one.kind)


def left_out_task(one: Swept) -> float:
    """Return the mean regret, over tasks, of what is best on the others."""
    costs = []
    for task in one.names:
        recipe, depth = fitted([one], one.tasks, [other for other in one.names if other != task])
        costs.append(one.best([task])[0] - one.at(recipe, depth, [task]))
    return float(np.mean(costs))


def table(models: Sequence[Swept]) -> list[str]:
    """Return a row for each default: its score and regret on each model."""
    lines = ["| default | " + " | ".join(f"{one.name} ({one.kind})" for one in models) + " |"]
    lines.append("|---|" + "---|" * len(models))
    best = {one.name: one.best() for one in models}

    def row(title: str, chosen: Sequence[tuple[str, float]]) -> None:
        cells = []
        for one, (recipe, depth) in zip(models, chosen, strict=True):
            score = one.at(recipe, depth)
            where = f"{recipe} at {round(depth * one.num_layers)}"
            cells.append(f"{score:.1f}, regret **{best[one.name][0] - score:.1f}** ({where})")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")

    cells = [f"{score:.1f} ({recipe} at {layer})" for score, recipe, layer in best.values()]
    lines.append("| best recipe and layer | " + " | ".join(cells) + " |")
    row("**default by kind of model**", [by_kind(one) for one in models])
    row("plain, last layer", [("plain", 1.0)] * len(models))
    row("plain, depth 0.8", [("plain", 0.8)] * len(models))
    for recipe in ("one-word", "one-word+center", "echo"):
        if all(recipe in one.tasks for one in models):
            for depth in (0.8, 0.9, 0.95, 1.0):
                row(f"{recipe}, depth {depth}", [(recipe, depth)] * len(models))
    if len(models) > 1:
        shared = [recipe for recipe in models[0].tasks if all(recipe in one.tasks for one in models)]
        others = [[other for other in models if other is not one] for one in models]
        row("fitted on the other model", [fitted(other, shared) for other in others])
    cells = [f"regret {left_out_task(one):.1f} on the task left out" for one in models]
    lines.append("| fitted on the other tasks of the model | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frames", nargs="+", metavar="KIND=FRAME")
    given = parser.parse_args()
    models = [read(kind, Path(path)) for kind, _, path in (word.partition("=") for word in given.frames)]
    lines = table(models)
    print("\n".join(lines))
    write_part("recipes", lines)


if __name__ == "__main__":
    main()
