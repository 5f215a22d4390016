"""Does a rule without labels choose a better recipe and layer than ``word-echo`` at a fixed depth?

    python -m benchmarks.zoo.rules TASKS --models built-in Gemma-3-270M … --out benchmarks/zoo/results [--device cuda]
    python -m benchmarks.zoo.rules TASKS --out benchmarks/zoo/results --table

Alignment and uniformity of every recipe and layer from half of the depth on, on 400 texts of each task; for each task
the rules choose by rank. The scores are those of ``MODEL.csv``, which the rules do not see. Writes ``MODEL-rules.csv``;
``--table`` prints what each rule scores on average.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import polars as pl

from benchmarks.zoo.run import recorded_tasks
from benchmarks.zoo.weights import open_model
from midlayer_encoders import LayerEncoder
from midlayer_encoders.metrics import alignment, uniformity
from midlayer_encoders.metrics.text_views import drop_words
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.recipes import recipe_of

RECIPES = ("plain", "one-word", "echo", "echo+weightedmean", "word-echo")
TEXTS = 400
DEPTH = 0.95


def measured(encoder: LayerEncoder, texts: dict[str, list[str]]) -> pl.DataFrame:
    """Return alignment and uniformity of each recipe, layer and task."""
    rows = []
    layers = list(range(resolve_layer(0.5, encoder.num_layers), encoder.num_layers + 1))
    for recipe in RECIPES:
        reader = encoder.with_recipe(recipe_of("recipe", recipe))
        for task, sample in texts.items():
            originals = reader.encode_layers(sample, layers, convert_to_tensor=True).double()
            copies = reader.encode_layers(drop_words(sample), layers, convert_to_tensor=True).double()
            for layer, first, second in zip(layers, originals, copies, strict=True):
                rows.append((recipe, layer, task, float(alignment(first, second)), float(uniformity(first))))
    return pl.DataFrame(rows, schema=["recipe", "layer", "task", "alignment", "uniformity"], orient="row")


def table(folder: Path, models: list[str]) -> pl.DataFrame:
    """Return the mean score of each rule's choices over the tasks of each model."""
    rows = []
    for model in models:
        candidates = pl.read_csv(folder / f"{model}-rules.csv").join(
            pl.read_csv(folder / f"{model}.csv"), on=["recipe", "layer", "task"]
        )
        means = pl.read_csv(folder / f"{model}.csv").group_by("recipe", "layer").agg(pl.col("score").mean())
        layer = resolve_layer(DEPTH, max(means["layer"]))
        best_plain = means.filter(recipe="plain")["score"].max()
        ranks = candidates.with_columns(
            aligned=pl.col("alignment").rank().over("task"), spread=(-pl.col("uniformity")).rank().over("task")
        )
        for name, recipes in {"single recipes": RECIPES[:-1], "all recipes": RECIPES}.items():
            part = ranks.filter(pl.col("recipe").is_in(recipes))
            for rule, key in {"alignment": pl.col("aligned"), "both": pl.col("aligned") + pl.col("spread")}.items():
                chosen = part.sort(key, descending=True).group_by("task").first()["score"].mean()
                rows.append((model, f"{rule}, {name}", chosen, chosen - best_plain))
        fixed = means.filter(recipe="word-echo", layer=layer)["score"].item()
        rows.append((model, f"word-echo at {DEPTH}", fixed, fixed - best_plain))
    return pl.DataFrame(rows, schema=["model", "rule", "score", "over the best plain layer"], orient="row")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        names = sorted(path.name.removesuffix("-rules.csv") for path in arguments.out.glob("*-rules.csv"))
        with pl.Config(tbl_rows=-1, fmt_str_lengths=40, float_precision=1):
            print(table(arguments.out, names))
        return
    tasks = recorded_tasks(sorted(path for path in arguments.tasks.iterdir() if path.is_dir()))
    texts = {name: list(task.keys)[:: max(1, len(task.keys) // TEXTS)][:TEXTS] for name, task in tasks.items()}
    for model in arguments.models:
        frame = measured(open_model(model, device=arguments.device), texts)
        frame.write_csv(arguments.out / f"{Path(model).name}-rules.csv", float_precision=5)
        print(Path(model).name, "done", flush=True)


if __name__ == "__main__":
    main()
