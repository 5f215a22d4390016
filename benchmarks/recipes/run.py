"""Every recipe at every layer on real tasks: what each step adds, with 95 % intervals over examples.

    python -m benchmarks.recipes.run TASKS --out runs/recipes [--model built-in] [--device cuda]

TASKS is a folder with a folder for each task. The sweep resumes. Intervals are of paired differences over the same
resampled examples: pairs, test texts, queries, and for clustering mteb's draws. Writes ``table.md`` and ``scores.csv``.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from scipy.stats import rankdata
from sklearn.metrics import average_precision_score

from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import Stage
from midlayer_encoders.reading.batches import count_tokens
from midlayer_encoders.recipes import PLAIN, Recipe, recipe_of
from midlayer_encoders.selection.rules import DEPTH
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.embedder import Embedder, Vectors, mapped_store, open_store
from midlayer_encoders.sweeping.layer_sweep import single_line_texts
from midlayer_encoders.sweeping.mteb_jobs import Prompts, StoredLayer
from midlayer_encoders.sweeping.scoring.classification import Classifiers
from midlayer_encoders.sweeping.scoring.clustering import Clusterings
from midlayer_encoders.sweeping.scoring.pairs import MEASURES, LabeledPairs, StsPairs, pair_similarities
from midlayer_encoders.sweeping.scoring.recording import Recorded, record
from midlayer_encoders.sweeping.scoring.retrieval import Ranking
from midlayer_encoders.tasks import task_label
from midlayer_encoders.tasks.sources import TaskSource, task_sources
from midlayer_encoders.tasks.tfidf import task_texts

RECIPES = (
    "plain", "plain+last", "plain+skip-first", "plain+center",
    "one-word", "one-word+mean", "one-word+center",
    "echo",
)  # fmt: skip
SAMPLES = 1000

Resampled = Callable[[np.random.Generator], float]
Samples = dict[tuple[str, int], np.ndarray]


def resampler(question: Any, vectors: torch.Tensor) -> Resampled:
    """Return a function that scores one layer, vectors ``(N, D)``, on examples drawn anew, of any type of task."""
    one = vectors[None]
    if isinstance(question, StsPairs):
        near = pair_similarities(one, question.first, question.second, measure="cosine")[0].cpu().numpy()
        ranks = np.stack([rankdata(near), rankdata(question.targets.cpu().numpy())])  # not ranked anew in a sample
        return lambda draw: float(np.corrcoef(ranks[:, draw.integers(0, len(near), len(near))])[0, 1])
    if isinstance(question, LabeledPairs):
        labels = question.targets.cpu().numpy()
        ends = question.first, question.second
        every = [pair_similarities(one, *ends, measure=measure)[0].cpu().numpy() for measure in MEASURES]
        near = max(every, key=lambda values: average_precision_score(labels, values))  # as max_ap on all pairs
        order = np.argsort(-near, kind="stable")
        positive = labels[order] == 1

        def average_precision(draw: np.random.Generator) -> float:
            counts = np.bincount(draw.integers(0, len(near), len(near)), minlength=len(near))[order]
            found = np.cumsum(counts * positive)
            return float(np.sum(counts * positive * found / np.maximum(np.cumsum(counts), 1)) / found[-1])

        return average_precision
    if isinstance(question, Classifiers):
        right = [(question.predictions(one, [data])[0, 0].cpu() == data.test_labels).double() for data in question.data]
        return _mean_of(torch.stack(right).mean(dim=0))
    if isinstance(question, Ranking):
        each = [float(_one_query(question, place).bootstrap(one)[0][0]) for place in range(len(question.queries))]
        return _mean_of(torch.tensor(each, dtype=torch.float64))
    if isinstance(question, Clusterings):
        return _mean_of(question._resampled(one)[0][0].cpu())  # over draws: a cluster is no property of one example
    raise TypeError(type(question))


def _mean_of(values: torch.Tensor) -> Resampled:
    numbers = values.numpy()
    return lambda draw: float(numbers[draw.integers(0, len(numbers), len(numbers))].mean())


def _one_query(question: Ranking, place: int) -> Ranking:
    return replace(
        question, queries=question.queries[place : place + 1], relevance=question.relevance[place : place + 1],
        outside=question.outside[place : place + 1], same=question.same[place : place + 1],
        candidates=None if question.candidates is None else question.candidates[place : place + 1],
    )  # fmt: skip


def questions(
    recipe: Recipe, sources: Sequence[TaskSource], encoder: LayerEncoder, folder: Path, known: dict[str, list[Recorded]]
) -> tuple[Vectors, list[Recorded]]:
    """Return the vectors of a recipe, as a sweep into ``folder`` keeps them, and what mteb asks on each task."""
    asked = encoder.with_recipe(recipe.apart())
    kept = open_store(folder / "embeddings", asked.spec, range(encoder.layer + 1), asked, "float32")
    embedder = Embedder(asked, kept)
    store = (
        mapped_store(embedder, recipe, single_line_texts(sources, Stage(None, "reading")))
        if recipe.changes_vectors or recipe.join is not None
        else kept
    )
    prompts = Prompts(asked)
    if kept.key in known:  # what is done to vectors changes nothing in what is asked
        return store, known[kept.key]
    found = known[kept.key] = []
    for source in sources:
        stored = StoredLayer(kept, 0, encoder.spec, prompts, ensure=embedder)
        with isolated_random():
            found.append(record(source.make(), stored.keys)[0])
    return store, found


def intervals(
    places: Sequence[tuple[str, int]], sources: Sequence[TaskSource], encoder: LayerEncoder, folder: Path
) -> Iterator[Samples]:
    """Yield resampled scores of recipes at layers, shape ``(tasks, samples)``, with each one more."""
    samples: Samples = {}
    known: dict[str, list[Recorded]] = {}
    for name, layer in places:
        store, asked = questions(recipe_of("recipe", name), sources, encoder, folder, known)
        rows = []
        for recorded in asked:
            vectors = torch.from_numpy(store.read(layer, recorded.keys)).to(encoder.device)
            score = resampler(recorded.scorer, vectors)
            draw = np.random.default_rng(0)  # the same examples for all
            rows.append([score(draw) for _ in range(SAMPLES)])
        samples[name, layer] = 100 * np.array(rows)
        print(f"{name} at layer {layer}: {samples[name, layer].mean():.1f}", flush=True)
        yield samples


def table(samples: Samples, tasks: Sequence[str], base: tuple[str, int]) -> list[str]:
    """Return a row for each recipe: its mean over tasks, the gain, and each task, with intervals."""

    def words(values: np.ndarray) -> str:
        low, high = np.quantile(values, [0.025, 0.975])
        return f"{values.mean():.1f} ({low:.1f} to {high:.1f})"

    lines = [f"| recipe | layer | mean | over {base[0]} at {base[1]} | " + " | ".join(tasks) + " |"]
    lines.append("|---" * (4 + len(tasks)) + "|")
    for (name, layer), found in sorted(samples.items(), key=lambda one: -one[1].mean()):
        gain = words((found - samples[base]).mean(axis=0)) if (name, layer) != base else "–"
        cells = " | ".join(words(row) for row in found)
        lines.append(f"| {name} | {layer} | **{words(found.mean(axis=0))}** | {gain} | {cells} |")
    return lines


def steps(result: SweepResult) -> list[str]:
    """Return the mean over tasks of each recipe at the last layer, at 0.8 of the depth and at its best layer."""
    lines = ["| recipe | last | depth 0.8 | best | at |", "|---|---|---|---|---|"]
    for name, found in result.summaries().items():
        average = found.average
        assert average is not None
        points, last = average.points, max(average.points)
        at = [points[last], points[round(DEPTH * last)], average.best]
        lines.append(f"| {name} | " + " | ".join(f"{value:.1f}" for value in at) + f" | {average.best_layer} |")
    return lines


def winners(result: SweepResult, tasks: Mapping[str, str]) -> list[str]:
    """Return for each task the best recipe and layer, beside the best layer of the plain text."""
    scores = result.frame.filter(pl.col("kind") == "score", pl.col("value").is_finite())
    lines = ["| task | best recipe | layer | score | plain, best layer | layer |", "|---|---|---|---|---|---|"]
    for task, label in tasks.items():
        rows = scores.filter(pl.col("dataset") == task).sort("value", descending=True)
        best, plain = rows.row(0, named=True), rows.filter(pl.col("recipe") == PLAIN).row(0, named=True)
        lines.append(
            f"| {label} | {best['recipe']} | {best['layer']} | {100 * best['value']:.1f} | {100 * plain['value']:.1f} | "
            f"{plain['layer']} |"
        )
    return lines


def times(encoder: LayerEncoder, recipes: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return what a text costs through the whole model under each template."""
    lines = ["| recipe | tokens a text | ms a text | of plain |", "|---|---|---|---|"]
    base = 0.0
    for name in recipes:
        recipe = recipe_of("recipe", name)
        if recipe.changes_vectors or "+" in name:
            continue
        asked = encoder.with_recipe(recipe)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            asked.encode(list(texts), batch_size=256, show_progress_bar=False)
            seconds.append(time.perf_counter() - start)
        tokens = np.mean(count_tokens(asked, texts))
        base = base or min(seconds)
        lines.append(f"| {name} | {tokens:.1f} | {1000 * min(seconds) / len(texts):.2f} | {min(seconds) / base:.2f} |")
    return lines


def arguments(description: str) -> argparse.ArgumentParser:
    """Return the arguments that every script about recipes takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="built-in")
    parser.add_argument("--device")
    return parser


def main() -> None:
    warnings.simplefilter("ignore")
    parser = arguments(__doc__)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--places", nargs="*", help="intervals of these alone, such as plain@6: the first is the base")
    given = parser.parse_args()
    folders = sorted(path for path in given.tasks.iterdir() if path.is_dir())
    sources = task_sources(folders)
    names = {source.name: task_label(source.name) for source in sources}
    encoder = LayerEncoder(given.model, -1, device=given.device)
    if given.places:
        lines, places = [], [(name, int(layer)) for name, _, layer in (one.partition("@") for one in given.places)]
    else:
        result, lines = swept(encoder, folders, given)
        lines += ["## By task", "", *winners(result, names), ""]
        averages = {name: one.average for name, one in result.summaries().items()}
        places = [(name, average.best_layer) for name, average in averages.items() if average is not None]
        places.sort(key=lambda place: place[0] != PLAIN)
        texts = sorted(task_texts(sources[0].make()))[:2048]
        lines += ["## Time", "", *times(encoder, given.recipes, texts), ""]
    given.out.mkdir(exist_ok=True)
    (given.out / "table.md").write_text("\n".join(lines) + "\n")
    for samples in intervals(places, sources, encoder, given.out):
        more = ["## With 95 % intervals", "", *table(samples, list(names.values()), places[0])]
        (given.out / "table.md").write_text("\n".join([*lines, *more]) + "\n")


def swept(encoder: LayerEncoder, folders: Sequence[Path], given: argparse.Namespace) -> tuple[SweepResult, list[str]]:
    """Sweep, and return the result and the beginning of the table."""
    start = time.perf_counter()
    result = sweep(encoder, folders, recipes=given.recipes, out=given.out)
    assert result.parts
    took = time.perf_counter() - start
    print(f"swept in {took:.0f} s", flush=True)
    result.to_html()
    result.frame.write_csv(given.out / "scores.csv", float_precision=6)
    where = torch.cuda.get_device_name() if encoder.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return result, [
        f"# Recipes: {encoder.name}",
        "",
        f"`python -m benchmarks.recipes.run TASKS --model {Path(given.model).name}`, {where}: {len(folders)} tasks,",
        f"{len(given.recipes)} recipes, every layer, {took:.0f} s.",
        "",
        *["## Mean over the tasks", "", *steps(result), ""],
    ]


if __name__ == "__main__":
    main()
