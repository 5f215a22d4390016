"""Sweep the models of the zoo under every recipe on real tasks, with 95 % intervals of what each choice gains.

    python -m benchmarks.zoo.run TASKS --models built-in gte-small … --out benchmarks/zoo/results [--device cuda]
    python -m benchmarks.zoo.run … --choices    # only the intervals, of scores that are there

TASKS is a folder with a folder for each task; a model is a folder that ``benchmarks.zoo.weights`` wrote, or the name of
a built-in model. For each model it writes ``MODEL.csv``, the score of every recipe, layer and task, and
``MODEL-choices.csv``, the choices that the pages compare, resampled over the same examples. ``benchmarks.zoo.table``
makes the page.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.recipes.run import SAMPLES, Samples, resampler
from benchmarks.zoo.weights import open_model
from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.recipes import PLAIN, recipe_of, try_recipe
from midlayer_encoders.sweeping.scoring.recording import Recorded, record
from midlayer_encoders.tasks import task_label
from midlayer_encoders.tasks.sources import task_sources

RECIPES = ("plain", "one-word", "echo", "echo+weightedmean", "word-echo")
DEPTHS = (0.85, 0.9, 0.95)
DEFAULT = ("word-echo", 0.95)


def choices(scores: pl.DataFrame, num_layers: int) -> dict[str, tuple[str, int]]:
    """Return the recipe and layer of each choice that the page compares."""
    means = scores.group_by("recipe", "layer").agg(pl.col("score").mean()).sort("score", descending=True)
    plain = means.filter(recipe=PLAIN)
    single = means.filter(~pl.col("recipe").str.starts_with("word-echo"))
    found = {
        "plain, last layer": (PLAIN, num_layers),
        "plain, best layer": (PLAIN, int(plain["layer"][0])),
        "best single recipe and layer": (str(single["recipe"][0]), int(single["layer"][0])),
    }
    recipes = set(scores["recipe"])
    if DEFAULT[0] in recipes:
        found |= {f"word-echo at {depth}": ("word-echo", resolve_layer(depth, num_layers)) for depth in DEPTHS}
        found |= {"word-echo, last layer": ("word-echo", num_layers)}
        found |= {
            f"{name} at {DEFAULT[1]}": (name, resolve_layer(DEFAULT[1], num_layers)) for name in ("one-word", "echo")
        }
    return found


def recorded_tasks(folders: Sequence[Path]) -> dict[str, Recorded]:
    """Return the scorer of each task; the keys of its rows are the texts themselves."""

    def texts(inputs: Any, **_: Any) -> list[str]:
        return [text for batch in inputs for text in batch["text"]]

    tasks = {}
    for source in task_sources(folders):
        with isolated_random():
            tasks[task_label(source.name)] = record(source.make(), texts)[0]
    return tasks


def resample(encoder: LayerEncoder, places: Sequence[tuple[str, int]], tasks: dict[str, Recorded]) -> Samples:
    """Return resampled scores x 100 of recipes at layers, shape ``(tasks, samples)`` each."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(key for task in tasks.values() for key in task.keys))}
    samples: Samples = {}
    for recipe in dict.fromkeys(name for name, _ in places):
        layers = sorted(layer for name, layer in places if name == recipe)
        reader = encoder.with_recipe(recipe_of("recipe", recipe))
        for layer, vectors in zip(
            layers, reader.encode_layers(list(rows), layers, convert_to_tensor=True), strict=True
        ):
            scores = []
            for task in tasks.values():
                score = resampler(task.scorer, vectors[[rows[text] for text in task.keys]].float())
                draw = np.random.default_rng(0)  # the same examples for all
                scores.append([score(draw) for _ in range(SAMPLES)])
            samples[recipe, layer] = 100 * np.array(scores)
            print(f"{recipe} at layer {layer}: {samples[recipe, layer].mean():.1f}", flush=True)
    return samples


def resampled_choices(samples: Samples, found: dict[str, tuple[str, int]]) -> pl.DataFrame:
    """Return the mean of each choice over tasks and its gain over the best plain layer, with intervals."""
    base = samples[found["plain, best layer"]].mean(axis=0)
    rows = []
    for choice, place in found.items():
        values = samples[place].mean(axis=0)
        bounds = [float(bound) for array in (values, values - base) for bound in np.quantile(array, [0.025, 0.975])]
        gain = float((values - base).mean())
        rows.append((choice, *place, float(values.mean()), *bounds[:2], gain, *bounds[2:]))
    names = ["choice", "recipe", "layer", "score", "low", "high", "gain", "gain_low", "gain_high"]
    return pl.DataFrame(rows, schema=names, orient="row")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--device")
    parser.add_argument("--max-length", type=int, help="tokens of a text; the model's maximum by default")
    parser.add_argument("--choices", action="store_true")
    arguments = parser.parse_args()
    folders = sorted(path for path in arguments.tasks.iterdir() if path.is_dir())
    tasks = recorded_tasks(folders)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for model in arguments.models:
        encoder = open_model(model, device=arguments.device, max_length=arguments.max_length)
        name = Path(model).name
        if not arguments.choices:
            recipes = [name for name in arguments.recipes if try_recipe(encoder, recipe_of("recipes", name))]
            with tempfile.TemporaryDirectory() as folder:
                result = sweep(encoder, folders, recipes=recipes, baselines=False, out=Path(folder, "sweep"))
                result.frame.filter(kind="score").select(
                    "recipe", "layer", pl.col("dataset").map_elements(task_label, pl.String).alias("task"),
                    (100 * pl.col("value")).round(3).alias("score"),
                ).write_csv(arguments.out / f"{name}.csv")  # fmt: skip
        found = choices(pl.read_csv(arguments.out / f"{name}.csv"), encoder.num_layers)
        samples = resample(encoder, list(dict.fromkeys(found.values())), tasks)
        resampled_choices(samples, found).write_csv(arguments.out / f"{name}-choices.csv", float_precision=2)
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
