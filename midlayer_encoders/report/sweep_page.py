"""The page of a sweep: the best layer, its gain, all scores and metrics, and how they were measured."""

from collections.abc import Mapping, Sequence

import polars as pl

from midlayer_encoders.errors import pluralize
from midlayer_encoders.frame.schema import metric_series
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
from midlayer_encoders.report.labels import amount, interval_words, number, significant
from midlayer_encoders.report.pages import Texts, block, figure_html, layer_table, page_html

_CHART_TEXT = (
    "In points (score × 100), each panel on its own scale, which does not start at zero. Disc: best layer; square: "
    "last layer. The best layer is selected by the same scores, so a gain of a fraction of a point may be luck."
)
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
        recipe_gains: of each recipe, for their intervals.
        sentences: the verdict; by default :func:`verdict` without intervals.
    """
    scores = summary(frame)
    metrics = metric_series(frame)
    task_names = {task.name for task in scores.tasks}
    shared = {name: by_task for name, by_task in (baselines or {}).items() if task_names & by_task.keys()}
    best = scores.average.best_layer if scores.average else None
    leads = {name: Gain(lead.points) for name, lead in baseline_gains(scores, _NO_RESAMPLES, shared, {}).items()}
    sentences = sentences or verdict(scores, leads=leads, recipes=recipes, recipe_gains=recipe_gains)
    has_curves = len(set().union(*(task.points for task in scores.tasks))) > 1
    sections: dict[str, list[str]] = {}
    if recipes:
        intervals = ", with 95 % intervals of the gain" if recipe_gains else ""
        sections["Recipes and layers"] = [
            figure_html(layer_charts.plot_recipes(recipes, shared)),
            "Each recipe by layer, in points (score × 100). The rest of the page is about the best recipe.",
            block("text_table", layer_charts.recipe_rows(recipes, shared, recipe_gains), f"Best layers{intervals}"),
        ]
    if has_curves:
        sections["Score by depth"] = [figure_html(layer_charts.plot_summary(scores, shared)), _CHART_TEXT]
    sections["Use this recipe and layer" if recipes else "Use this layer"] = [block("code", export or {})]
    if metrics:
        chart = layer_charts.plot_metrics(frame, chosen=best)
        line = "" if best is None else f" The upright line is layer {best}, the best by score."
        text = f"Each metric by layer, on its own scale.{line}{layer_charts.gap_text(chart)}"
        sections["Metrics by depth"] = [text, figure_html(chart, meanings=True)]
    sections["Confirmed by mteb"] = [confirmed_words(frame)]
    metric_columns: dict[str, Texts] = {}
    for name, curves in metrics.items():
        for curve in curves:
            texts: Texts = {k: significant(v, zeros=True) for k, v in zip(curve.layers, curve.values, strict=True)}
            metric_columns[f"{name} {curve.label}".rstrip()] = texts
    columns = score_columns(scores, shared, parameters, seconds)
    sections["The numbers"] = [
        layer_table("Points by layer", columns, best if has_curves else None),
        layer_table("Metrics by layer", metric_columns),
    ]
    model = scores.model.removeprefix("local/")
    sections["How it was measured"] = [block("facts", {"model": model, **how})]
    revision = "" if scores.revision == "default" else f" at revision {scores.revision}"
    return page_html(
        title,
        [" ".join(sentences) or f"{pluralize(len(metrics), 'metric')} by layer; no task was scored."],
        sections,
        subtitle=model + revision if revision or model not in title else "",
        notes=[*scores.remarks, *notes],
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
    average = scores.average
    if average is None:
        return (
            [f"{pluralize(len(scores.tasks), 'task')} scored, none of the layers on all of them."]
            if scores.tasks
            else []
        )
    subject = scores.tasks[0].name if len(scores.tasks) == 1 else f"average over {len(scores.tasks)} tasks"
    best = (
        layer_charts.recipe_words(recipes, recipe_gains) if recipes else _layer_sentence(scores, average, subject, gain)
    )
    ahead: list[str] = []
    behind: list[str] = []
    for name, lead in (leads or {}).items():
        more = f"{number(abs(lead.points))} points {'more' if lead.points > 0 else 'less'} than the best layer"
        interval = f" ({text})" if (text := interval_words(lead)) else ""
        group = ahead if round(lead.points, 1) > 0 else behind
        group.append(f"{name} scores {number(average.best + lead.points)} on {subject}, {more}{interval}.")
    return [*ahead, best, *behind]


def _layer_sentence(scores: Summary, average: Curve, subject: str, gain: Gain | None) -> str:
    """Return a sentence about the best layer and the last."""
    best, last = average.best_layer, average.last_layer
    name = "the last layer" if last == scores.num_layers else f"layer {last}"
    scored = f"Layer {best}{f' of {scores.num_layers}' if scores.num_layers else ''} scores {number(average.best)}"
    if len(average.points) == 1:
        return f"{scored} on {subject}; no other was scored."
    if round(average.gain, 1) == 0:
        return f"No layer scores more than {name}: {number(average.last)} on {subject}."
    interval = f", {text}" if gain and (text := interval_words(gain)) else ""
    return f"{scored} on {subject}, {number(average.gain)} points more than {name} ({number(average.last)}){interval}."


def confirmed_words(frame: pl.DataFrame) -> str:
    """Return a sentence that compares mteb's scores with those computed for all layers together; empty without any.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> pair = ("score", 0.7), ("confirmed", 0.71)
        >>> rows = [("m", "main", 1, 0.5, kind, "STS", "spearman", value) for kind, value in pair]
        >>> confirmed_words(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        'mteb confirmed 1 score: it differs by at most 1.00 points (STS at layer 1).'
    """
    scores, confirmed = (frame.filter(kind=kind) for kind in ("score", "confirmed"))
    keys = [name for name in ("dataset", "layer", "recipe", "dims", "precision") if name in frame.columns]
    pairs = confirmed.join(scores, on=keys, nulls_equal=True, maintain_order="left")
    if pairs.is_empty():
        return ""
    points = pairs.with_columns(points=100 * (pl.col("value") - pl.col("value_right")).abs())
    task, layer, most = points.sort("points", descending=True).select("dataset", "layer", "points").row(0)
    scores_text = "1 score: it differs" if len(pairs) == 1 else f"{len(pairs)} scores: they differ"
    return f"mteb confirmed {scores_text} by at most {most:.2f} points ({task} at layer {layer})."


def score_columns(
    scores: Summary,
    baselines: Baselines,
    parameters: Mapping[int, int] | None = None,
    seconds: Mapping[int, float] | None = None,
) -> dict[str, Texts]:
    """Return the costs, the average and each task by layer and baseline."""
    layers = set().union(*(task.points for task in scores.tasks))
    costs: dict[str, Texts] = {
        "Parameters, M": {layer: number(count / 1e6) for layer, count in (parameters or {}).items() if layer in layers},
        "Milliseconds": {layer: amount(1e3 * time) for layer, time in (seconds or {}).items() if layer in layers},
    }
    columns = {heading: texts for heading, texts in costs.items() if texts}
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
