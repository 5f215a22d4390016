"""The committed frames that pages quote, read once."""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import polars as pl

from benchmarks.intervals import mean_interval
from benchmarks.pages import part_of
from midlayer_encoders.frame.steps import step_of
from tests.docs.stated import ROOT

Curve = dict[int, float]
BENCH = ROOT / "benchmarks"
SMOLLM2, MINILM = "SmolLM2-135M", "all-MiniLM-L6-v2"
METRICS = ("dime", "infonce", "dataset_entropy", "prompt_entropy")


@cache
def table(path: str) -> pl.DataFrame:
    return pl.read_csv(BENCH / path, infer_schema_length=None)


def mean_by_layer(frame: pl.DataFrame) -> Curve:
    """Return the mean x 100 over tasks of every layer."""
    means = frame.group_by("layer").agg(100 * pl.col("value").mean()).sort("layer")
    return dict(means.iter_rows())


@cache
def six_tasks(model: str) -> Curve:
    """Return the mean score of a model on about 500 rows of six tasks."""
    return mean_by_layer(table("results/real_tasks.csv").filter(model=model))


@cache
def recipe(name: str, model: str = "smollm2") -> Curve:
    """Return the mean score under a recipe on six tasks at full size."""
    rows = table(f"recipes/results/{model}.csv").filter(kind="score", recipe=name)
    assert rows["dataset"].n_unique() == 6
    complete = rows.filter(pl.col("dataset").n_unique().over("layer") == 6)  # a layer of equal vectors has no score
    return mean_by_layer(complete)


def over_tasks(model: str, places: Sequence[tuple[str, int]]) -> tuple[float, float, float]:
    """Return the gain of a recipe at a layer over another, and its interval over the six tasks."""
    rows = table(f"recipes/results/{model}.csv").filter(kind="score")
    one, other = (rows.filter(recipe=name, layer=layer).sort("dataset") for name, layer in places)
    assert one["dataset"].to_list() == other["dataset"].to_list()
    assert len(one) == 6
    return mean_interval((100 * (one["value"] - other["value"])).to_list())


def best(curve: Curve) -> tuple[float, int]:
    layer = max(curve, key=curve.__getitem__)
    return curve[layer], layer


def last(curve: Curve) -> float:
    return curve[max(curve)]


@cache
def trained(run: str) -> pl.DataFrame:
    """Return a run of the first record."""
    return table(f"pretraining/results/first/{run}.csv")


def stage(run: str, step: int | None = None) -> pl.DataFrame:
    """Return a run's rows at a step, by default the last that was scored."""
    frame = trained(run)
    steps = {step_of(revision): revision for revision in frame.filter(kind="score")["revision"].unique()}
    return frame.filter(revision=steps[max(steps) if step is None else step])


def metric(frame: pl.DataFrame, name: str, **which: Any) -> Curve:
    """Return a metric's value at every layer."""
    rows = frame.filter(name=name, **which).sort("layer")
    return dict(rows.select("layer", "value").iter_rows())


@cache
def outside() -> dict[str, tuple[Curve, dict[str, Curve]]]:
    """Return the scores and metrics by layer of the seven models outside the paper's tables."""
    measured = table("selection/results/real_metrics.csv").filter(dataset="wikitext")
    found = {
        model: (six_tasks(model), {name: metric(measured, name, model=model) for name in METRICS})
        for model in (MINILM, SMOLLM2)
    }
    for run in ("causal", "masked", "simcse", "ssm", "supervised"):
        rows = stage(run)
        found[run] = (mean_by_layer(rows.filter(kind="score")), {name: metric(rows, name) for name in METRICS})
    return found


def regret(rule: str, model: str) -> float:
    """Return how far the layer of ``last``, ``fixed-depth`` or ``min-METRIC`` is below the best, in points."""
    scores, metrics = outside()[model]
    layer = {"last": max(scores), "fixed-depth": round(0.8 * max(scores))}.get(rule)
    if layer is None:
        curve = metrics[rule.removeprefix("min-").replace("-", "_")]
        layer = min(curve, key=curve.__getitem__)
    return max(scores.values()) - scores[layer]


@cache
def selection_table(part: str) -> dict[tuple[str, str], list[float]]:
    """Return a part of benchmarks/selection/README.md: by rule and column a number, and the ends of its interval.

    ``benchmarks/selection/run.py`` writes it from the paper's tables, which are not in the repository.
    """
    head, _, *rows = part_of(BENCH / "selection" / "README.md", part).splitlines()
    columns, *cells_by_rule = ([cell.strip() for cell in row.strip("|").split("|")] for row in (head, *rows))
    return {
        (rule, column): [float(number) for number in re.findall(r"[+-]?\d+(?:\.\d+)?", cell)]
        for rule, *cells in cells_by_rule
        for column, cell in zip(columns[1:], cells, strict=True)
    }


@cache
def onnx() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCH / "results" / "export_onnx.json").read_text())
    return found
