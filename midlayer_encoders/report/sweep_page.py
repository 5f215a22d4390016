"""The page of a sweep: the best layer, its gain, all scores and metrics, and how they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from midlayer_encoders.frame import (
    Baselines,
    Curve,
    Summary,
    average_baseline,
    check_frame,
    check_one_model,
    metric_series,
    summary,
)
from midlayer_encoders.frame.pareto import Cost, amount, cost_text
from midlayer_encoders.report.charts import Chart
from midlayer_encoders.report.labels import number
from midlayer_encoders.report.layer_charts import gap_text, metrics_chart
from midlayer_encoders.report.pages import Column, LayerTable, metric_table, render, write_page
from midlayer_encoders.report.score_charts import (
    average_levels,
    average_panel,
    losses_panel,
    recipe_rows,
    recipe_tile,
    recipe_words,
    recipes_map,
    recipes_panel,
    tasks_chart,
)


def write_report(
    frame: pl.DataFrame,
    path: str | Path,
    *,
    title: str,
    how: Mapping[str, str],
    parameters: Mapping[int, int] | None = None,
    seconds: Mapping[int, float] | None = None,
    export: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    baselines: Baselines | None = None,
) -> Path:
    """Write the page of :func:`report_html`, create its folder if needed, and return the path.

    Example:
        >>> import tempfile
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> frame = pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = write_report(frame, f"{folder}/report.html", title="Every layer of m", how={"seed": "0"})
        ...     "10.0 points more than the last layer" in page.read_text(encoding="utf-8")
        True
    """
    text = report_html(
        frame,
        title=title,
        how=how,
        parameters=parameters,
        seconds=seconds,
        export=export,
        notes=notes,
        baselines=baselines,
    )
    return write_page(text, path)


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
    """
    frame = check_frame(frame)
    model, revision = check_one_model(frame)
    scores = summary(frame)
    metrics = metric_series(frame)
    task_names = {task.name for task in scores.tasks}
    shared = {
        name: {task: score for task, score in by_task.items() if task in task_names}
        for name, by_task in (baselines or {}).items()
    }
    shared = {name: by_task for name, by_task in shared.items() if by_task}
    parameters, seconds = parameters or {}, seconds or {}
    costs = _cost_texts(parameters, seconds)
    several_layers = len(set().union(*(task.points for task in scores.tasks))) > 1
    best = scores.average.best_layer if scores.average else None
    metric_panels = metrics_chart(frame, chosen=best) if metrics else None
    recipe_layers = [set(recipe.average.points) for recipe in (recipes or {}).values() if recipe.average]
    return render(
        "sweep.html",
        title=title,
        notes=[*scores.remarks, *notes],
        model=model,
        revision=revision,
        recipe_verdict=recipe_words(recipes) if recipes else "",
        recipe_tile=recipe_tile(recipes) if recipes else None,
        parameters=parameters,
        seconds=seconds,
        baselines=shared,
        metrics=metrics,
        export=export or {},
        how={"Model": model, "Revision": revision, **how},
        recipes=recipes,
        recipes_chart=Chart((recipes_panel(recipes, shared),)) if recipes else None,
        recipes_map=recipes_map(recipes) if recipes else None,
        recipe_rows=recipe_rows(recipes, shared) if recipes else [],
        recipes_incomplete=any(layers != set().union(*recipe_layers) for layers in recipe_layers),
        scores=scores,
        average_chart=Chart((average_panel(scores, shared, costs),)) if several_layers and scores.average else None,
        tasks_chart=tasks_chart(scores, shared, costs) if several_layers else None,
        losses=losses_panel(scores) if several_layers else None,
        line_names=list(zip(("dashed line", "dotted one", "one of dashes and dots"), shared, strict=False)),
        averages=[level.text for level in average_levels(scores, shared)],
        metrics_chart=metric_panels,
        gaps=gap_text(metric_panels) if metric_panels else "",
        best=best,
        confirmed=confirmed_words(frame),
        tables=[_score_table(scores, parameters, seconds, shared), metric_table(metrics)],
    )


def confirmed_words(frame: pl.DataFrame) -> list[str]:
    """Return a line for each task that compares mteb's scores with those computed for all layers together.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> pair = ("score", 0.7), ("confirmed", 0.71)
        >>> rows = [("m", "main", 1, 0.5, kind, "STS", "spearman", value) for kind, value in pair]
        >>> confirmed_words(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        ['STS, confirmed by mteb: layer 1 71.0 (70.0 together).']
    """
    columns = ["dataset", "layer", "value"]
    confirmed = frame.filter(kind="confirmed").select(columns)
    together = frame.filter(kind="score").select(columns)
    pairs = confirmed.join(together, on=["dataset", "layer"], suffix="_together")
    lines = []
    for (task,), rows in pairs.group_by("dataset", maintain_order=True):
        texts = (
            f"layer {layer} {number(100 * mteb)} ({number(100 * together)} together)"
            for _, layer, mteb, together in rows.sort("layer").iter_rows()
        )
        lines.append(f"{task}, confirmed by mteb: {', '.join(texts)}.")
    return lines


def _score_table(
    scores: Summary, parameters: Mapping[int, int], seconds: Mapping[int, float], baselines: Baselines
) -> LayerTable:
    layers = set().union(*(task.points for task in scores.tasks))
    columns = []
    if layers & set(parameters):
        columns.append(
            Column("Parameters, M", {layer: number(parameters[layer] / 1e6) for layer in layers & set(parameters)})
        )
    if layers & set(seconds):
        columns.append(Column("Milliseconds", {layer: amount(1e3 * seconds[layer]) for layer in layers & set(seconds)}))
    if scores.average and len(scores.tasks) > 1:
        means = [average_baseline(scores, by_task) for by_task in baselines.values()]
        columns.append(_score_column(scores.average, "Average", means))
    for task in scores.tasks:
        feet = [100 * by_task[task.name] if task.name in by_task else None for by_task in baselines.values()]
        columns.append(_score_column(task, task.name, feet))
    winner = scores.average.best_layer if scores.average and len(layers) > 1 else None
    return LayerTable("Points by layer", columns, winner, list(baselines))


def _score_column(curve: Curve, heading: str, baselines: Sequence[float | None]) -> Column:
    texts = {layer: number(value) for layer, value in curve.points.items()}
    best = curve.best_layer if len(texts) > 1 else None
    return Column(heading, texts, best, [*map(number, baselines)])


def _cost_texts(parameters: Mapping[int, int], seconds: Mapping[int, float]) -> dict[int, str]:
    costs: dict[int, dict[Cost, float]] = {layer: {"parameters": count} for layer, count in parameters.items()}
    for layer, time in seconds.items():
        costs.setdefault(layer, {})["milliseconds"] = 1e3 * time
    return {layer: cost_text(by_kind) for layer, by_kind in costs.items()}
