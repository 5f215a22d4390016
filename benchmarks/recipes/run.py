"""Every recipe at every layer on real tasks: what each step adds, with 95 % intervals over examples.

``python -m benchmarks.recipes.run TASKS --out runs/recipes [--model built-in] [--device cuda]``. TASKS is a folder with a
folder for each task. The sweep resumes; the intervals are of paired differences, from the same resampled examples.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders.scoring.classification import Classifiers, predictions
from midlayer_encoders.scoring.clustering import Clusterings, v_measure
from midlayer_encoders.scoring.k_means import mini_batch_k_means
from midlayer_encoders.scoring.pairs import LabelledPairs
from midlayer_encoders.scoring.recording import record
from midlayer_encoders.scoring.retrieval import Ranking
from midlayer_encoders.scoring.sts import StsPairs
from midlayer_encoders.sweeping import RecipesResult
from midlayer_encoders.tasks import isolated_random, task_label, task_sources

RECIPES = (
    "plain", "plain+skip-first", "plain+center", "plain+filter", "plain+whiten", "plain+last",
    "one-word", "one-word+center", "one-word+filter", "one-word+center+filter", "one-word+whiten", "one-word+mean",
    "summarize", "summarize+center", "echo", "echo+center", "instruction",
)  # fmt: skip
SAMPLES = 1000

Resampled = Callable[[np.random.Generator], float]


def resampler(question: Any, vectors: torch.Tensor) -> Resampled:
    """Return a function that scores one layer, vectors ``(N, D)``, on examples drawn anew, of any type of task."""
    one = vectors[None]
    if isinstance(question, StsPairs | LabelledPairs):
        wanted = "wanted" if isinstance(question, StsPairs) else "labels"

        def pairs(draw: np.random.Generator) -> float:
            rows = torch.from_numpy(draw.integers(0, len(question.first), len(question.first)))
            names = ("first", "second", wanted)
            drawn = replace(question, **{name: getattr(question, name)[rows] for name in names})
            return float(drawn.scores(one)[0])

        return pairs
    if isinstance(question, Classifiers):
        right = [
            (predictions(one, [each], strength=question.strength, max_iterations=question.max_iterations,
                         tolerance=question.tolerance)[0, 0].cpu() == each.test_labels).double()
            for each in question.experiments
        ]  # fmt: skip
        return _mean_of(torch.stack(right).mean(dim=0))
    if isinstance(question, Ranking):
        each = [float(_one_query(question, place).scores(one)[0]) for place in range(len(question.queries))]
        return _mean_of(torch.tensor(each, dtype=torch.float64))
    if isinstance(question, Clusterings):
        found = []
        for draws in question.draws:
            labels = mini_batch_k_means(
                one, draws.rows, clusters=draws.clusters, batch_size=question.batch_size, seed=question.seed
            )
            found.append(v_measure(draws.labels.to(labels.device).expand_as(labels), labels).flatten().cpu())
        return _mean_of(torch.cat(found))  # over draws: a cluster is no property of one example
    raise TypeError(type(question))


def _mean_of(values: torch.Tensor) -> Resampled:
    numbers = values.numpy()
    return lambda draw: float(numbers[draw.integers(0, len(numbers), len(numbers))].mean())


def _one_query(question: Ranking, place: int) -> Ranking:
    return replace(
        question, queries=question.queries[place : place + 1], relevance=question.relevance[place : place + 1],
        unseen=question.unseen[place : place + 1], same=question.same[place : place + 1],
        candidates=None if question.candidates is None else question.candidates[place : place + 1],
    )  # fmt: skip


def intervals(result: RecipesResult, sources: Sequence[Any], encoder: LayerEncoder, base: tuple[str, int]) -> Any:
    """Return for each recipe, at its best layer, mean score and gain over ``base`` with 95 % intervals."""
    from midlayer_encoders.recipes import recipe_of
    from midlayer_encoders.sweeping.mapped_store import mapped_store
    from midlayer_encoders.sweeping.run import _open_store, _sample_of_lines
    from midlayer_encoders.sweeping.stored_layer import Embedder, Prompts, StoredLayer

    places = {name: one.average.best_layer for name, one in result.summaries().items()}
    wanted = [base, *((name, layer) for name, layer in places.items() if (name, layer) != base)]
    samples: dict[tuple[str, int], np.ndarray] = {}
    center = _sample_of_lines(sources)
    for name, layer in wanted:
        recipe = recipe_of("recipe", name)
        asked = encoder.with_recipe(recipe)
        kept = _open_store(result.folder / "embeddings", asked.spec, range(encoder.layer + 1), asked, "float32")
        embedder = Embedder(asked, kept)
        store: Any = mapped_store(embedder, recipe, center) if recipe.changes_vectors else kept
        prompts = Prompts(tuple((key, text or "") for key, text in asked.prompts.items()), asked.default_prompt_name)
        rows = []
        for source in sources:
            stored = StoredLayer(store, layer, name="a/b", revision="c", prompts=prompts, ensure=embedder)
            with isolated_random():
                (recorded, *_) = record(source.make(), stored.keys)
            vectors = torch.from_numpy(store.read(layer, recorded.keys)).to(encoder.device)
            score = resampler(recorded.question, vectors)
            draw = np.random.default_rng(0)  # the same examples for all
            rows.append([score(draw) for _ in range(SAMPLES)])
        samples[name, layer] = 100 * np.array(rows)
        print(f"{name} at layer {layer}: {samples[name, layer].mean():.1f}", flush=True)
    return samples


def table(samples: Any, tasks: Sequence[str], base: tuple[str, int]) -> list[str]:
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


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="built-in")
    parser.add_argument("--device")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    given = parser.parse_args()
    folders = sorted(path for path in given.tasks.iterdir() if path.is_dir())
    encoder = LayerEncoder(given.model, -1, device=given.device)
    start = time.perf_counter()
    result = sweep(encoder, folders, recipes=given.recipes, out=given.out)
    assert isinstance(result, RecipesResult)
    took = time.perf_counter() - start
    result.to_html()
    sources = task_sources(folders)
    plain = result.summaries()["plain"].average
    assert plain is not None
    base = ("plain", plain.best_layer)
    samples = intervals(result, sources, encoder, base)
    lines = [f"# Recipes: {encoder.name}", "", f"`python -m benchmarks.recipes.run TASKS --model {given.model}`: "]
    lines[-1] += f"{len(folders)} tasks, {len(given.recipes)} recipes, {took:.0f} s on {encoder.device}."
    lines += ["", *table(samples, [task_label(source.name) for source in sources], base)]
    (given.out / "table.md").write_text("\n".join(lines) + "\n")
    kept = {f"{name}@{layer}": np.round(found, 4).tolist() for (name, layer), found in samples.items()}
    (given.out / "samples.json").write_text(json.dumps(kept))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
