"""The committed frames that pages quote, read once."""

import re
from collections.abc import Sequence
from functools import cache

import polars as pl

from benchmarks.intervals import mean_interval
from benchmarks.pages import part_of
from tests.docs.stated import ROOT

Curve = dict[int, float]
BENCH = ROOT / "benchmarks"
SMOLLM2, MINILM = "SmolLM2-135M", "all-MiniLM-L6-v2"


@cache
def table(path: str) -> pl.DataFrame:
    return pl.read_csv(BENCH / path, infer_schema_length=None)


def mean_by_layer(frame: pl.DataFrame) -> Curve:
    """Return the mean x 100 over tasks of every layer."""
    means = frame.group_by("layer").agg(100 * pl.col("value").mean()).sort("layer")
    return dict(means.iter_rows())


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


def last(curve: Curve) -> float:
    return curve[max(curve)]


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
