"""The paper's figures over depth: scores, metrics, correlations, training and layer selection."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import polars as pl

from midlayer_encoders.comparing.correlation import correlate
from midlayer_encoders.errors import counted
from midlayer_encoders.frame.curves import curves
from midlayer_encoders.frame.schema import tidy_frame, tidy_rows
from midlayer_encoders.paper.setting import MissingInputError, Setting
from midlayer_encoders.report.labels import number, signed
from midlayer_encoders.report.paper_page import score_curves
from midlayer_encoders.report.results import kept_frame
from midlayer_encoders.report.training_page import steps_words
from midlayer_encoders.selection import CannotChooseError, choose

Rows: TypeAlias = tuple[tuple[str, ...], ...]
"""Rows of a table, the headings first."""


# --- Figure 1: scores by depth --------------------------------------------------------------------------------------


def scores_by_depth(setting: Setting) -> pl.DataFrame:
    """Return scores on the tasks by depth."""
    return pl.concat(frame.filter(kind="score") for frame in setting.sweeps())


def score_words(frame: pl.DataFrame) -> list[str]:
    """Describe where the mean score is best, and its gain over the last layer."""
    sentences = []
    for line in score_curves(frame):
        best = max(range(len(line.y)), key=lambda index: line.y[index])
        sentences.append(
            f"{line.label}: best {number(line.y[best])} at {line.x[best]:.0f} % of the depth, "
            f"{signed(line.y[best] - line.y[-1])} over the last layer."
        )
    return sentences


# --- Figures 2, 10, 12: metrics by depth ----------------------------------------------------------------------------


def metrics_by_depth(setting: Setting) -> pl.DataFrame:
    """Return the metrics of the models."""
    return pl.concat(setting.metrics(model) for model in setting.required_models())


def valley_words(frame: pl.DataFrame) -> list[str]:
    """Describe the prompt entropy of the first layer, the lowest and the last."""
    sentences = []
    for (model,), part in frame.filter(name="prompt_entropy").sort("layer").group_by("model", maintain_order=True):
        low = part.sort("value")[0]
        sentences.append(
            f"{model}: prompt entropy {part['value'][0]:.2f} at the first layer, lowest {low['value'][0]:.2f} at "
            f"{100 * low['depth'][0]:.0f} % of the depth, {part['value'][-1]:.2f} at the last (nats)."
        )
    return sentences


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


def correlation_words(frame: pl.DataFrame) -> list[str]:
    """Describe each model's distance correlations, highest first, and why some are undefined."""
    sentences = []
    for (model,), part in frame.filter(task="average").group_by("model", maintain_order=True):
        defined = part.filter(pl.col("value").is_not_null(), statistic="dcor").sort("value", descending=True)
        values = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in defined["metric", "value"].rows())
        sentences.append(f"{model}, distance correlation with the mean score: {values or 'none is defined'}.")
        for (note,), rows in part.filter(pl.col("value").is_null()).group_by("note", maintain_order=True):
            sentences.append(f"{model}: {', '.join(rows['metric'].unique(maintain_order=True))} {note}.")
    return sentences


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


def training_words(frame: pl.DataFrame) -> list[str]:
    """Describe which layers change most, and which settle first."""
    return [f"{frame['model'][0]}: {sentence}" for sentence in steps_words(frame)]


# --- Figure 13: fine-tuning -----------------------------------------------------------------------------------------


def tuned_beside_base(setting: Setting) -> pl.DataFrame:
    """Return the metrics of the base model and of the tuned models on the same texts."""
    from midlayer_encoders.comparing import IntervalSettings, compare

    base, *tuned = (setting.load(model) for model in setting.required_models(2))
    intervals = IntervalSettings(resamples=20)
    texts = setting.required_texts(4)
    return compare(base, *tuned, texts=texts, views=4, seed=setting.seed, intervals=intervals).frame


def tuned_words(frame: pl.DataFrame) -> list[str]:
    """Describe how the entropy and invariance of tuned models differ from the base model's."""
    means = frame.group_by("model", "name", maintain_order=True).agg(pl.col("value").mean())
    base, *tuned_models = means.pivot("name", index="model", values="value").iter_rows(named=True)
    return [
        f"{tuned['model']} against {base['model']}, mean over layers: prompt entropy "
        f"{signed(tuned['prompt_entropy'] - base['prompt_entropy'], 2)} nats, InfoNCE "
        f"{signed(tuned['infonce'] - base['infonce'], 2)} (lower is more invariant)."
        for tuned in tuned_models
    ]


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


def chosen_words(frame: pl.DataFrame) -> list[str]:
    """Describe the scores of the best layer, of the last layer, and of the best rule without labels."""
    sentences = []
    for (model,), part in frame.group_by("model", maintain_order=True):
        means = dict(part.group_by("name").agg(100 * pl.col("value").mean()).iter_rows())
        rule = max((name for name in _RULES if name in means and name != "last"), key=lambda name: means[name])
        sentences.append(
            f"{model}: the best layer {means['best']:.1f}, the last {means['last']:.1f}; of the rules without labels "
            f"{rule} is best with {means[rule]:.1f}."
        )
    return sentences
