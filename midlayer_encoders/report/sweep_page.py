"""The page of a sweep: the best layer, its gain, all scores and metrics, and how they were measured."""

from collections.abc import Mapping, Sequence
from typing import cast

import polars as pl

from midlayer_encoders.errors import counted
from midlayer_encoders.frame.pareto import Cost, amount, cost_text
from midlayer_encoders.frame.schema import Series, metric_series
from midlayer_encoders.frame.summaries import (
    RESAMPLES_SCHEMA,
    Baselines,
    Curve,
    Gain,
    Summary,
    average_baseline,
    baseline_gains,
    summary,
)
from midlayer_encoders.report import layer_charts
from midlayer_encoders.report.labels import interval_words, number, signed
from midlayer_encoders.report.pages import Column, metric_column, render

_NO_RESAMPLES = pl.DataFrame(schema=RESAMPLES_SCHEMA)


def report_html(
    frame: pl.DataFrame,
    *,
    title: str,
    how: Mapping[str, str],
    parameters: Mapping[int, int] | None = None,
    seconds: Mapping[int, float] | None = None,
    export: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    baselines: Baselines | None = None,
    recipes: Mapping[str, Summary] | None = None,
    gain: Gain | None = None,
    recipe_gains: layer_charts.RecipeGains | None = None,
    sentences: Sequence[str] = (),
) -> str:
    """Return a self-contained page about one model: its best layer, the gain, and how they were measured.

    Args:
        frame: scores, metrics or both of one model at one revision.
        title: of the page.
        how: facts about the measurement: versions, spec, seeds.
        parameters: of the model cut at each layer.
        seconds: per text, up to each layer.
        export: code that exports the best layer, by language, such as ``Python`` and ``Shell``.
        notes: sentences below the verdict, such as failed tasks.
        baselines: score of each baseline on each task, a fraction.
        recipes: scores of each recipe, if there are several; ``frame`` holds the best one.
        gain: of the best layer over the last, for its interval.
        recipe_gains: of each recipe, for their intervals.
        sentences: the verdict; by default :func:`verdict` without the intervals of baselines.
    """
    scores = summary(frame)
    metrics = metric_series(frame)
    task_names = {task.name for task in scores.tasks}
    shared = {
        name: {task: score for task, score in by_task.items() if task in task_names}
        for name, by_task in (baselines or {}).items()
    }
    shared = {name: by_task for name, by_task in shared.items() if by_task}
    best = scores.average.best_layer if scores.average else None
    leads = {name: Gain(lead.points) for name, lead in baseline_gains(scores, _NO_RESAMPLES, shared, {}).items()}
    sentences = sentences or verdict(scores, gain, leads=leads, recipes=recipes, recipe_gains=recipe_gains)
    metrics_chart = layer_charts.plot_metrics(frame, chosen=best) if metrics else None
    return render(
        "sweep.html",
        title=title,
        notes=[*scores.remarks, *notes],
        scores=scores,
        several_layers=len(set().union(*(task.points for task in scores.tasks))) > 1,
        parameters=parameters or {},
        seconds=seconds or {},
        costs=_cost_texts(parameters or {}, seconds or {}),
        baselines=shared,
        export=export or {},
        model=scores.model.removeprefix("local/"),
        how={"model": scores.model.removeprefix("local/"), **how},
        verdict=" ".join(sentences) or _metrics_sentence(metrics),
        recipes=recipes,
        recipe_gains=recipe_gains,
        interval=interval_words(gain) if gain else "",
        charts=layer_charts,
        line_names=list(zip(("dashed line", "dotted one", "one of dashes and dots"), shared, strict=False)),
        metrics=metrics,
        metrics_chart=metrics_chart,
        gaps=layer_charts.gap_text(metrics_chart) if metrics_chart else "",
        best=best,
        confirmed=confirmed_words(frame),
        score_columns=_score_columns(scores, parameters or {}, seconds or {}, shared),
        metric_columns=[
            metric_column(name, series.layers, series.values, series.label)
            for name, many in metrics.items()
            for series in many
        ],
    )


def verdict(
    scores: Summary,
    gain: Gain | None = None,
    *,
    leads: Mapping[str, Gain] | None = None,
    recipes: Mapping[str, Summary] | None = None,
    recipe_gains: layer_charts.RecipeGains | None = None,
) -> list[str]:
    """Return sentences: what scores most, the best layer and its gain, and the baselines behind it.

    Args:
        scores: of the model, under the best recipe if there are several.
        gain: of the best layer over the last, for its interval.
        leads: gain of each baseline over the best layer.
        recipes: scores of each recipe, if there are several.
        recipe_gains: of each recipe, for their intervals.

    Example:
        >>> curve = Curve("STS", "spearman", {0: 20.0, 1: 30.0})
        >>> for sentence in verdict(Summary("m", "main", 1, (curve,), curve, (), ()), leads={"TF-IDF": Gain(5.0)}):
        ...     print(sentence)
        TF-IDF scores 35.0 on STS, 5.0 points more than the best layer.
        No layer scores more than the last layer: 30.0 on STS.
    """
    if not scores.tasks:
        return []
    average = scores.average
    if average is None:
        return [f"{counted(len(scores.tasks), 'task')} scored, none of the layers on all of them."]
    subject = scores.tasks[0].name if len(scores.tasks) == 1 else f"average over {len(scores.tasks)} tasks"
    best = layer_charts.recipe_words(recipes, recipe_gains) if recipes else _layer_sentence(scores, subject, gain)
    ahead: list[str] = []
    others: list[str] = []
    for name, lead in (leads or {}).items():
        interval = f" ({text})" if (text := interval_words(lead)) else ""
        score = number(average.best + lead.points)
        if signed(lead.points) == "0.0":
            others.append(f"{name} scores as much{interval}.")
        elif lead.points < 0:
            others.append(f"{name} scores {score}, {number(-lead.points)} points less{interval}.")
        else:
            more = f"{number(lead.points)} points more"
            ahead.append(
                f"{name} scores {score}{'' if ahead else f' on {subject}'}, {more} than the best layer{interval}."
            )
    return [*ahead, best, *others]


def _layer_sentence(scores: Summary, subject: str, gain: Gain | None) -> str:
    """Return a sentence about the best layer and the last."""
    average = cast(Curve, scores.average)
    best, last = average.best_layer, average.last_layer
    name = "the last layer" if last == scores.num_layers else f"layer {last}"
    scored = f"Layer {best}{f' of {scores.num_layers}' if scores.num_layers else ''} scores {number(average.best)}"
    if len(average.points) == 1:
        return f"{scored} on {subject}; no other was scored."
    if average.is_level:
        return f"All {len(average.points)} layers score the same on {subject}: {number(average.best)}."
    if best == last:
        return f"No layer scores more than {name}: {number(average.last)} on {subject}."
    if number(average.gain) == "0.0":
        return f"{scored} on {subject}, as much as {name}."
    interval = f", {text}" if gain and (text := interval_words(gain)) else ""
    return f"{scored} on {subject}, {number(average.gain)} points more than {name} ({number(average.last)}){interval}."


def _metrics_sentence(metrics: Mapping[str, Sequence[Series]]) -> str:
    layers = {layer for many in metrics.values() for series in many for layer in series.layers}
    return f"{counted(len(metrics), 'metric')} at {counted(len(layers), 'layer')}; no task was scored."


def confirmed_words(frame: pl.DataFrame) -> str:
    """Return a sentence that compares mteb's scores with those computed for all layers together; empty without any.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> pair = ("score", 0.7), ("confirmed", 0.71)
        >>> rows = [("m", "main", 1, 0.5, kind, "STS", "spearman", value) for kind, value in pair]
        >>> confirmed_words(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        'mteb confirmed 1 score: it differs by at most 1.00 points (STS at layer 1).'
    """
    columns = ["dataset", "layer", "value"]
    confirmed = frame.filter(kind="confirmed").select(columns)
    together = frame.filter(kind="score").select(columns)
    pairs = confirmed.join(together, on=["dataset", "layer"], suffix="_together", maintain_order="left")
    if pairs.is_empty():
        return ""
    points = pairs.with_columns(points=100 * (pl.col("value") - pl.col("value_together")).abs())
    task, layer, most = points.sort("points", descending=True).select("dataset", "layer", "points").row(0)
    scores = "1 score: it differs" if len(pairs) == 1 else f"{len(pairs)} scores: they differ"
    return f"mteb confirmed {scores} by at most {most:.2f} points ({task} at layer {layer})."


def _score_columns(
    scores: Summary, parameters: Mapping[int, int], seconds: Mapping[int, float], baselines: Baselines
) -> list[Column]:
    layers = set().union(*(task.points for task in scores.tasks))
    costs = {
        "Parameters, M": {layer: number(parameters[layer] / 1e6) for layer in layers & set(parameters)},
        "Milliseconds": {layer: amount(1e3 * seconds[layer]) for layer in layers & set(seconds)},
    }
    columns = [Column(heading, texts) for heading, texts in costs.items() if texts]
    if scores.average and len(scores.tasks) > 1:
        means = [average_baseline(scores, by_task) for by_task in baselines.values()]
        columns.append(_score_column(scores.average, "Average", means))
    for task in scores.tasks:
        feet = [100 * by_task[task.name] if task.name in by_task else None for by_task in baselines.values()]
        columns.append(_score_column(task, task.name, feet))
    return columns


def _score_column(curve: Curve, heading: str, baselines: Sequence[float | None]) -> Column:
    texts = {layer: number(value) for layer, value in curve.points.items()}
    best = curve.best_layer if len(texts) > 1 else None
    return Column(heading, texts, best, [*map(number, baselines)])


def _cost_texts(parameters: Mapping[int, int], seconds: Mapping[int, float]) -> dict[int, str]:
    costs: dict[int, dict[Cost, float]] = {layer: {"parameters": count} for layer, count in parameters.items()}
    for layer, time in seconds.items():
        costs.setdefault(layer, {})["milliseconds"] = 1e3 * time
    return {layer: cost_text(by_kind) for layer, by_kind in costs.items()}
