"""Compare the methods without training on short texts, passages, long documents and other languages, with intervals.

    python -m benchmarks.zoo.rival_tables RUNS    # pack what benchmarks.zoo.rivals wrote into results/rivals
    python -m benchmarks.zoo.table                # the page that states them

Setting and layer of each method are the ones with the highest mean over the other English tasks of the model. The
default, ``word-echo+center``, stays at 0.95 of the depth.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import polars as pl

from benchmarks.zoo.rivals import DEPTHS, OWN_PROMPT
from midlayer_encoders.models.anatomy import resolve_layer

FOLDER = Path(__file__).parent / "results" / "rivals"
MODELS = ("SmolLM2-135M", "Gemma-3-270M", "TinyStories-15M")
DEPTH = 0.95
DEFAULT = "word-echo+center"
SHORT, LONG, LONGEST = "short", "300 to 600 words", "1,300 to 1,600 words"
CROSS = "German questions, English passages"
GROUPS = {
    SHORT: (
        "Banking77Classification", "EmotionClassification", "STSBenchmark", "StackOverflowTitlesClustering",
        "TrecQAReranking", "TwitterURLCorpus",
    ),
    "passages": ("XQuAD-en",),
    "joined passages": ("XQuADLong-en",),
    LONG: ("ArticleClustering", "AuthorClassification", "NextPassageReranking"),
    LONGEST: ("LongAuthorClassification",),
}  # fmt: skip
LANGUAGES = {
    "German pairs": ("STSBenchmark-de",),
    "French pairs": ("STSBenchmark-fr",),
    "German passages": ("XQuAD-de", "XQuADLong-de"),
    "Chinese passages": ("XQuAD-zh",),
    CROSS: ("XQuADCross-de-en",),
}
ENGLISH = tuple(dict.fromkeys(task for tasks in GROUPS.values() for task in tasks))
#: TinyStories reads 256 tokens: two copies of a long passage do not fit.
TOO_LONG = {"TinyStories-15M": (LONG, LONGEST, "joined passages")}

Setting: TypeAlias = tuple[str, int]
Gain: TypeAlias = tuple[float, float, float]


def method_of(variant: str) -> str:
    """Return the method of a variant, without its setting."""
    return variant.removesuffix(" centered").partition(",")[0].partition(" from ")[0].partition(" up to ")[0]


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

    @property
    def default(self) -> Setting:
        """What ``select`` answers without labels."""
        return self.at(DEFAULT)

    def at(self, variant: str, depth: float = DEPTH) -> Setting:
        return variant, resolve_layer(depth, self.num_layers)

    def settings(self, method: str) -> list[Setting]:
        """Return the variants and layers of a method."""
        rows = self.frame.filter(pl.col("variant").map_elements(method_of, pl.String) == method)
        return list(rows.select("variant", "layer").unique(maintain_order=True).iter_rows())

    def rows(self, tasks: Sequence[str], settings: Setting | Sequence[Setting]) -> list[int | None]:
        each = [settings] * len(tasks) if isinstance(settings, tuple) else settings
        return [self.places.get((task, *setting)) for task, setting in zip(tasks, each, strict=True)]

    def mean(self, tasks: Sequence[str], settings: Setting | Sequence[Setting]) -> float:
        """Return the mean score over tasks, or minus infinity if one is missing."""
        rows = self.rows(tasks, settings)
        return -np.inf if None in rows or not rows else float(np.mean(self.scores[rows]))

    def best(self, tasks: Sequence[str], *methods: str) -> Setting:
        """Return the setting of methods with the highest mean over tasks."""
        settings = [setting for method in methods for setting in self.settings(method)]
        return max(settings, key=lambda setting: self.mean(tasks, setting))

    def interval(self, tasks: Sequence[str], settings: Setting | Sequence[Setting]) -> tuple[float, float]:
        """Return the 95 % interval of a mean score over resampled examples."""
        return _interval(self.draws[self.rows(tasks, settings)].mean(axis=0, dtype=float))

    def gain(self, tasks: Sequence[str], settings: Setting | Sequence[Setting]) -> Gain:
        """Return the gain over the best plain layer, centered or not, and its 95 % interval over resampled examples."""
        base = self.best(tasks, "plain")
        mine, theirs = (self.draws[self.rows(tasks, each)].mean(axis=0, dtype=float) for each in (settings, base))
        return self.mean(tasks, settings) - self.mean(tasks, base), *_interval(mine - theirs)

    def tokens(self, tasks: Sequence[str], settings: Setting | Sequence[Setting]) -> float:
        return float(self.frame["tokens"].to_numpy()[self.rows(tasks, settings)].mean())

    def chosen(self, method: str, task: str) -> Setting:
        """Return the setting with the highest mean over the other English tasks; the default has a fixed one."""
        if method == DEFAULT:
            return self.default
        return self.best([other for other in english_tasks(self.model) if other != task], method)

    def chosen_elsewhere(self, task: str) -> Setting:
        """Return the depth of the default and the weight of the first copy that are best on other models and tasks."""
        others = [results(model) for model in MODELS[:2] if model != self.model]
        tasks = {other.model: [name for name in english_tasks(other.model) if name != task] for other in others}
        variants = dict.fromkeys(name for name, _ in self.settings(DEFAULT) if not name.startswith(OWN_PROMPT))
        choices = [(variant, depth) for variant in variants for depth in DEPTHS]
        return self.at(
            *max(choices, key=lambda each: sum(other.mean(tasks[other.model], other.at(*each)) for other in others))
        )


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975]).tolist()
    return low, high


@cache
def results(model: str) -> Results:
    """Return the results of a model."""
    return Results(model, pl.read_csv(FOLDER / f"{model}.csv"), np.load(FOLDER / f"{model}.npz")["draws"])


def groups(model: str, of: dict[str, tuple[str, ...]] = GROUPS) -> dict[str, tuple[str, ...]]:
    """Return the groups of tasks that were measured on a model, and whose texts it can read."""
    measured = set(results(model).frame["task"])
    found = {name: tasks for name, tasks in of.items() if measured.issuperset(tasks)}
    return {name: tasks for name, tasks in found.items() if name not in TOO_LONG.get(model, ())}


def english_tasks(model: str) -> list[str]:
    """Return the English tasks of a model."""
    return [task for tasks in groups(model).values() for task in tasks]


def rival_settings(model: str, tasks: Sequence[str]) -> dict[str, Setting | list[Setting]]:
    """Return the settings of each method on tasks: the best plain layer first, which knows their labels."""
    of = results(model)
    methods = dict.fromkeys(method_of(variant) for variant in of.frame["variant"])
    methods.pop("word-echo")
    chosen = {method: [of.chosen(method, task) for task in tasks] for method in methods}
    elsewhere = {f"{DEFAULT}, depth and weight from other models": [of.chosen_elsewhere(task) for task in tasks]}
    return {"plain, best layer": of.best(tasks, "plain"), **chosen, **elsewhere}


def pack(runs: Path) -> None:
    """Write one file of scores and one of draws for each model."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        paths = sorted(runs.glob(f"{model}-*-rivals.csv"))
        draws = np.concatenate([np.load(path.with_suffix(".npz"))["draws"] for path in paths])
        frame = pl.concat([pl.read_csv(path) for path in paths]).drop("low", "high", "milliseconds")
        frame.write_csv(FOLDER / f"{model}.csv", float_precision=2)
        np.savez_compressed(FOLDER / f"{model}.npz", draws=draws.astype(np.float16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    pack(parser.parse_args().runs)


if __name__ == "__main__":
    main()
