"""Compare the methods without training on short texts, passages, long documents and German, with intervals.

    python -m benchmarks.zoo.rival_tables RESULTS [--costs RESULTS]

RESULTS holds what ``benchmarks.zoo.rivals`` wrote. Setting and layer of each method are those with the highest mean over
the other English tasks of the model, ``word-echo`` stays at its default depth. Writes ``results/rivals.csv``, a row for
each model, group of tasks and method, ``results/rivals-depths.csv``, what depth and weight of the first copy score, and
``results/rivals-MODEL.csv``, the score of every variant, layer and task.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl

from midlayer_encoders.models.anatomy import resolve_layer

FOLDER = Path(__file__).parent / "results"
DEPTH = 0.95
GROUPS = {
    "short": (
        "Banking77Classification", "EmotionClassification", "STSBenchmark", "StackOverflowTitlesClustering",
        "TrecQAReranking", "TwitterURLCorpus",
    ),
    "passages": ("XQuAD-en",),
    "joined passages": ("XQuADLong-en",),
    "300 to 600 words": ("ArticleClustering", "AuthorClassification", "NextPassageReranking"),
    "1,300 to 1,600 words": ("LongAuthorClassification",),
    "German": ("STSBenchmark-de", "XQuAD-de", "XQuADLong-de"),
    "German questions, English passages": ("XQuADCross-de-en",),
}  # fmt: skip
ENGLISH = tuple(task for group in list(GROUPS)[:5] for task in GROUPS[group])
OURS = ("word-echo", "word-echo+center")


@dataclass(frozen=True)
class Results:
    """The scores of one model: a row for each task, variant and layer, and its scores on resampled examples."""

    model: str
    frame: pl.DataFrame
    draws: np.ndarray

    @cached_property
    def num_layers(self) -> int:
        return int(self.frame.filter(variant="plain")["layer"].max())  # type: ignore[arg-type]

    @cached_property
    def places(self) -> dict[tuple[str, str, int], int]:
        """The row of each task, variant and layer."""
        keys = zip(self.frame["task"], self.frame["variant"], self.frame["layer"], strict=True)
        return {key: row for row, key in enumerate(keys)}

    @cached_property
    def scores(self) -> np.ndarray:
        return self.frame["score"].to_numpy()

    def settings(self, method: str) -> list[tuple[str, int]]:
        """Return the variants and layers of a method."""
        rows = self.frame.filter(pl.col("variant").map_elements(method_of, pl.String) == method)
        return list(rows.select("variant", "layer").unique(maintain_order=True).iter_rows())

    def mean(self, tasks: list[str], setting: tuple[str, int]) -> float:
        """Return the mean score over tasks, or minus infinity if one is missing."""
        rows = [self.places.get((task, *setting)) for task in tasks]
        return -np.inf if None in rows or not rows else float(np.mean(self.scores[rows]))

    def chosen(self, method: str, task: str) -> tuple[str, int]:
        """Return the setting with the highest mean over the other English tasks; ours has a fixed one."""
        if method in OURS:
            return method, resolve_layer(DEPTH, self.num_layers)
        others = [other for other in ENGLISH if other != task and (other, "plain", 0) in self.places]
        return max(self.settings(method), key=lambda setting: self.mean(others, setting))


def method_of(variant: str) -> str:
    """Return the method of a variant, without its setting."""
    return variant.removesuffix(" centered").partition(",")[0].partition(" from ")[0].partition(" up to ")[0]


def read(folder: Path) -> Iterator[Results]:
    """Yield the results of each model."""
    paths = sorted(folder.rglob("*-rivals.csv"))
    frame = pl.concat([pl.read_csv(path) for path in paths])
    draws = np.concatenate([np.load(path.with_suffix(".npz"))["draws"] for path in paths])
    for model in frame["model"].unique(maintain_order=True):
        rows = (frame["model"] == model).to_numpy()
        yield Results(model, frame.filter(model=model), draws[rows])


def interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975]).tolist()
    return low, high


def compare(results: Results) -> Iterator[tuple[str | float, ...]]:
    """Yield a row for each group of tasks and method."""
    for group, names in GROUPS.items():
        tasks = [task for task in names if (task, "plain", 0) in results.places]
        if not tasks:
            continue
        best_plain = max(results.settings("plain"), key=lambda setting: results.mean(tasks, setting))
        base = [results.places[(task, *best_plain)] for task in tasks]
        rows = {"plain, best layer": base}
        for method in dict.fromkeys(map(method_of, results.frame["variant"])):
            settings = {task: results.chosen(method, task) for task in tasks}
            if all((task, *setting) in results.places for task, setting in settings.items()):
                rows[method] = [results.places[(task, *setting)] for task, setting in settings.items()]
        for method, found in rows.items():
            score, draws = results.scores[found].mean(), results.draws[found].mean(axis=0)
            gain, gains = score - results.scores[base].mean(), draws - results.draws[base].mean(axis=0)
            tokens = results.frame["tokens"].to_numpy()[found].mean()
            yield results.model, group, method, len(tasks), score, *interval(draws), gain, *interval(gains), tokens


def depths(models: list[Results]) -> Iterator[tuple[str | float, ...]]:
    """Yield what each depth and weight score, and the ones chosen on other models and on other tasks."""
    for results in models:
        for group, names in GROUPS.items():
            tasks = [task for task in names if (task, "plain", 0) in results.places]
            settings = [setting for setting in results.settings("word-echo+center") if tasks]
            for variant, layer in settings:
                yield results.model, group, variant, layer / results.num_layers, results.mean(tasks, (variant, layer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    models = list(read(arguments.results))
    names = ["model", "group", "method", "tasks", "score", "low", "high", "gain", "gain_low", "gain_high", "tokens"]
    table = pl.DataFrame([row for results in models for row in compare(results)], schema=names, orient="row")
    table.write_csv(FOLDER / "rivals.csv", float_precision=2)
    names = ["model", "group", "variant", "depth", "score"]
    pl.DataFrame(list(depths(models)), schema=names, orient="row").write_csv(
        FOLDER / "rivals-depths.csv", float_precision=2
    )
    for results in models:
        columns = results.frame.select("variant", "layer", "task", "score")
        columns.write_csv(FOLDER / f"rivals-{results.model}.csv", float_precision=2)
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=160, fmt_str_lengths=50, float_precision=1):
        print(table)


if __name__ == "__main__":
    main()
