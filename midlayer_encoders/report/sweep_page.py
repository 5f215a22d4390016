"""The page of a sweep: the best layer, its gain, all scores and metrics, and how they were measured."""

from collections.abc import Mapping, Sequence
from typing import cast

import polars as pl

from midlayer_encoders.errors import counted
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
from midlayer_encoders.report.labels import amount, duration, interval_words, number, signed
from midlayer_encoders.report.pages import Texts, block, figure_html, layer_table, metric_texts, page_html

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
    parameters, seconds = parameters or {}, seconds or {}
    task_names = {task.name for task in scores.tasks}
    shared = {name: by_task for name, by_task in (baselines or {}).items() if task_names & by_task.keys()}
    best = scores.average.best_layer if scores.average else None
    leads = {name: Gain(lead.points) for name, lead in baseline_gains(scores, _NO_RESAMPLES, shared, {}).items()}
    sentences = sentences or verdict(scores, gain, leads=leads, recipes=recipes, recipe_gains=recipe_gains)
    several_layers = len(set().union(*(task.points for task in scores.tasks))) > 1
    sections: dict[str, list[str]] = {}
    if recipes:
        intervals = ", with 95 % intervals of the gain" if recipe_gains else ""
        sections["Recipes and layers"] = [
            figure_html(layer_charts.plot_recipes(recipes, shared)),
            "Each recipe by layer, in points (score × 100). The rest of the page is about the best recipe.",
            block("text_table", layer_charts.recipe_rows(recipes, shared, recipe_gains), f"Best layers{intervals}"),
        ]
    depth = sections["Score by depth"] = []
    if several_layers:
        depth += [
            figure_html(layer_charts.plot_summary(scores, shared)),
            "In points (score × 100), each panel on its own scale, which does not start at zero. Disc: best layer; "
            "square: last layer. The best layer is selected by the same scores, so a gain of a fraction of a point may "
            "be luck.",
        ]
    depth += _baseline_sentences(scores, shared)
    if scores.average:
        depth += _savings(scores.average, parameters, seconds)
    sections["Use this recipe and layer" if recipes else "Use this layer"] = [block("code", export or {})]
    if metrics:
        chart = layer_charts.plot_metrics(frame, chosen=best)
        line = "" if best is None else f" The upright line is layer {best}, the best by score."
        text = f"Each metric by layer, on its own scale.{line}{layer_charts.gap_text(chart)}"
        sections["Metrics by depth"] = [text, figure_html(chart, meanings=True)]
    if confirmed := confirmed_words(frame):
        text = "All layers were scored together, and some of them again by mteb's own evaluators."
        sections["Confirmed by mteb"] = [f"{text} {confirmed}"]
    columns = score_columns(scores, shared, parameters, seconds)
    metric_columns = {
        f"{name} {series.label}".rstrip(): metric_texts(series.layers, series.values)
        for name, many in metrics.items()
        for series in many
    }
    sections["The numbers"] = [
        layer_table("Points by layer", columns, best if several_layers else None),
        layer_table("Metrics by layer", metric_columns),
    ]
    model = scores.model.removeprefix("local/")
    sections["How it was measured"] = [block("facts", {"model": model, **how})]
    revision = "" if scores.revision == "default" else f" at revision {scores.revision}"
    return page_html(
        title,
        [" ".join(sentences) or _metrics_sentence(metrics)],
        sections,
        subtitle=model + revision if revision or model not in title else "",
        notes=[*scores.remarks, *notes],
    )


def _baseline_sentences(scores: Summary, baselines: Baselines) -> list[str]:
    """Return on which of several tasks each baseline scores as much as the best layer or more."""
    sentences = []
    for name, by_task in baselines.items() if len(scores.tasks) > 1 else ():
        leads = {task.name: 100 * by_task[task.name] - task.best for task in scores.tasks if task.name in by_task}
        tasks = [task for task, lead in leads.items() if round(lead, 1) >= 0]
        names = f": {', '.join(tasks[:6])}{', …' if len(tasks) > 6 else ''}" if tasks else ""
        count = f"{len(tasks) or 'none'} of {counted(len(leads), 'task')}"
        sentences.append(f"{name} scores as much as the best layer or more on {count}{names}.")
    return sentences


def _savings(average: Curve, parameters: Mapping[int, int], seconds: Mapping[int, float]) -> list[str]:
    """Return the costs of the best layer as shares of the last one's, if both are known."""
    best, last = average.best_layer, average.last_layer
    costs = (parameters, "parameters", amount), (seconds, "per text", duration)
    changes = [
        f"{write(cost[best])} {noun}, {number(100 * cost[best] / cost[last], 0)} % of {write(cost[last])}"
        for cost, noun, write in costs
        if best != last and cost.get(best) and cost.get(last)
    ]
    return [f"At layer {best}: {'; '.join(changes)}."] if changes else []


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


def score_columns(
    scores: Summary,
    baselines: Baselines,
    parameters: Mapping[int, int] | None = None,
    seconds: Mapping[int, float] | None = None,
) -> dict[str, Texts]:
    """Return the costs, the average and each task by layer and baseline."""
    parameters, seconds = parameters or {}, seconds or {}
    layers = set().union(*(task.points for task in scores.tasks))
    columns: dict[str, Texts] = {
        "Parameters, M": {layer: number(parameters[layer] / 1e6) for layer in layers & set(parameters)},
        "Milliseconds": {layer: amount(1e3 * seconds[layer]) for layer in layers & set(seconds)},
    }
    columns = {heading: texts for heading, texts in columns.items() if texts}
    if scores.average and len(scores.tasks) > 1:
        means = {name: average_baseline(scores, by_task) for name, by_task in baselines.items()}
        columns["Average"] = _score_texts(scores.average, means)
    for task in scores.tasks:
        levels = {name: 100 * by_task[task.name] for name, by_task in baselines.items() if task.name in by_task}
        columns[task.name] = _score_texts(task, levels)
    return columns


def _score_texts(curve: Curve, levels: Mapping[str, float | None]) -> Texts:
    points: Texts = {layer: number(score) for layer, score in curve.points.items()}
    return points | {name: number(level) for name, level in levels.items()}
