"""The paper's figures over depth: scores, metrics, correlations, training and layer selection."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import polars as pl

from midlayer_encoders.comparing.correlation import correlate
from midlayer_encoders.errors import counted
from midlayer_encoders.frame.curves import curves
from midlayer_encoders.frame.schema import tidy_frame, tidy_rows
from midlayer_encoders.paper.setting import MissingInputError, Setting
from midlayer_encoders.report.labels import number
from midlayer_encoders.report.results import kept_frame
from midlayer_encoders.selection import CannotChooseError, choose

Rows: TypeAlias = tuple[tuple[str, ...], ...]
"""Rows of a table, the headings first."""


# --- Figure 1: scores by depth --------------------------------------------------------------------------------------


def scores_by_depth(setting: Setting) -> pl.DataFrame:
    """Return scores on the tasks by depth."""
    return pl.concat(frame.filter(kind="score") for frame in setting.sweeps())


# --- Figures 2, 10, 12: metrics by depth ----------------------------------------------------------------------------


def metrics_by_depth(setting: Setting) -> pl.DataFrame:
    """Return the metrics of the models."""
    return pl.concat(setting.metrics(model) for model in setting.required_models())


# --- Figures 3, 8, 9: correlations ----------------------------------------------------------------------------------


_RESAMPLES = 100  # for the intervals of each task and metric; more would take longer than everything else combined


def correlations(setting: Setting) -> pl.DataFrame:
    """Return the correlations of metrics with scores; they are saved because three figures use them."""
    return pl.concat(
        kept_frame(
            setting.out / "correlations" / f"sweep{index}-{setting.digest}.parquet",
            partial(correlate, frame, resamples=_RESAMPLES, seed=setting.seed),
        )
        for index, frame in enumerate(setting.sweeps())
    )


def correlation_table(frame: pl.DataFrame, statistics: Sequence[str]) -> Rows:
    """Return a row for each model and metric: the correlations and their intervals."""
    average = frame.filter(pl.col("task") == "average", pl.col("statistic") != "signed_dcor")
    rows: list[tuple[str, ...]] = [("model", "metric", *statistics)]
    for (model, metric), part in average.group_by("model", "metric", maintain_order=True):
        cells = {name: _interval(*ends) for name, *ends in part.select("statistic", "value", "low", "high").iter_rows()}
        rows.append((str(model), str(metric), *(cells.get(name, "–") for name in statistics)))
    return tuple(rows)


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "–"
    return number(value, 2) + (f" ({number(low, 2)} to {number(high, 2)})" if low is not None else "")


# --- Figures 4 and 11: training -------------------------------------------------------------------------------------


def training(setting: Setting, names: Sequence[str]) -> pl.DataFrame:
    """Return metrics at every checkpoint of the first model."""
    from midlayer_encoders.comparing import progression

    if not setting.revisions:
        raise MissingInputError("It needs checkpoints of the first model: pass --revisions step1,step512,…")
    options = {**setting.options.changed(), "max_length": setting.max_length, "revision": None}
    texts = setting.required_texts(4)
    model = setting.required_models()[0]
    result = progression(
        model, setting.revisions, texts=texts, metrics=list(names), views=4, seed=setting.seed, **options
    )
    return result.frame


# --- Figure 13: fine-tuning -----------------------------------------------------------------------------------------


def tuned_beside_base(setting: Setting) -> pl.DataFrame:
    """Return the metrics of the base model and of the tuned models on the same texts."""
    from midlayer_encoders.comparing import IntervalSettings, compare

    base, *tuned = (setting.load(model) for model in setting.required_models(2))
    intervals = IntervalSettings(resamples=20)
    texts = setting.required_texts(4)
    return compare(base, *tuned, texts=texts, views=4, seed=setting.seed, intervals=intervals).frame


# --- Table 2: selection ---------------------------------------------------------------------------------------------

_RULES = ("last", "fixed-depth", "min-dime", "min-infonce", "min-dataset-entropy", "min-prompt-entropy")


def chosen_layers(setting: Setting) -> pl.DataFrame:
    """Return the chosen layer and its score for each model, task and rule."""
    parts = [part for frame in setting.sweeps() for part in frame.partition_by("model", maintain_order=True)]
    return pl.concat(_chosen_by_rules(part) for part in parts)


def _chosen_by_rules(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the chosen layer and its score for each task and rule, from metrics of the task's own texts if available.

    ``best`` is the one layer with the highest mean score. A layer that was not scored counts as the nearest that was.
    Tasks on which some rule lacks its metric are left out, so that the rules' means are over the same tasks.
    """
    scores, measured = (frame.filter(pl.col("kind") == kind) for kind in ("score", "metric"))
    mean_scores = curves(frame).score
    best = max(mean_scores, key=lambda layer: mean_scores[layer])
    rows: list[dict[str, Any]] = []
    for (task,), part in scores.group_by("dataset", maintain_order=True):
        task_metrics = measured.filter(pl.col("dataset") == task)
        task_curves = curves(pl.concat([part, measured if task_metrics.is_empty() else task_metrics]))
        for rule in ("best", *_RULES):
            try:
                layer = best if rule == "best" else choose(task_curves, rule)[0]
            except CannotChooseError:
                continue
            nearest = min(task_curves.score, key=lambda scored: (abs(scored - layer), scored))
            values = {nearest: task_curves.score[nearest]}
            rows += tidy_rows(values, task_curves, kind="score", dataset=str(task), name=rule)
    chosen = tidy_frame(rows)
    common = chosen.filter(pl.len().over("dataset") == chosen["name"].n_unique())
    return chosen if common.is_empty() else common


def chosen_table(frame: pl.DataFrame) -> Rows:
    """Return the mean score of each rule, a column for each model."""
    models = frame["model"].unique(maintain_order=True).to_list()
    means = frame.group_by("model", "name").agg(pl.col("value").mean(), pl.len())
    cells = {
        (model, rule): f"{100 * value:.1f} ({counted(count, 'task')})"
        for model, rule, value, count in means.iter_rows()
    }
    rows = [(rule, *(cells.get((model, rule), "–") for model in models)) for rule in ("best", *_RULES)]
    return (("rule", *models), *rows)
