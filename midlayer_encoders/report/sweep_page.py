"""The page of one model: which layer is best, by how much, its metrics, and how all of it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from midlayer_encoders.frame import Baselines, Summary, check_frame, check_one_model, metric_series, summary
from midlayer_encoders.report.charts import Chart
from midlayer_encoders.report.metrics import broken_words, metrics_chart
from midlayer_encoders.report.page import code_lines, document, facts, large, section, soft, write_page
from midlayer_encoders.report.page_figures import figure_html, strips_html, wide_html
from midlayer_encoders.report.recipes import recipe_rows, recipe_tile, recipe_words, recipes_map, recipes_panel
from midlayer_encoders.report.scores import average_panel, losses_panel, tasks_chart
from midlayer_encoders.report.tables import metric_tables, plain_table, score_tables
from midlayer_encoders.report.ticks import Cost, cost_words
from midlayer_encoders.report.words import baseline_words, confirmed_words, tiles, verdict

__all__ = ["report_html", "write_report"]


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
    """Write the page of :func:`report_html` and return where it lies; its folder is made.

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
    """Return one self-contained page about one model: which layer is best, by how much, and how that was measured.

    Args:
        frame: the results of one model at one revision, scores or metrics or both.
        title: heading of the page.
        how: what was measured and with what: versions, spec, seeds.
        parameters: number of weights of the model cut at each layer.
        seconds: that a text takes up to each layer.
        export: the line that exports the best layer, by language, such as ``Python`` and ``Shell``.
        notes: sentences to print below the verdict, such as tasks that failed.
        baselines: name of each, and its score on each task, a fraction; shown even where it wins.
        recipes: what each of several recipes scored; ``frame`` is then of the best one.
    """
    frame = check_frame(frame)
    model, revision = check_one_model(frame)
    found, metrics = summary(frame), metric_series(frame)
    known = _of_tasks(baselines or {}, {one.name for one in found.tasks})
    parameters, seconds = parameters or {}, seconds or {}
    words = recipe_words(recipes) if recipes else verdict(found, metrics)
    first = [recipe_tile(recipes)] if recipes else []
    lead = soft(f"{model} at revision {revision}") + large(words) + tiles(found, parameters, seconds, first)
    numbers = score_tables(found, parameters=parameters, seconds=seconds, baselines=known)
    sections = [
        section("Use this recipe and layer" if recipes else "Use this layer", code_lines(export or {})),
        section("Recipes and layers", _recipes(recipes, known) if recipes else ""),
        *_score_sections(found, known, _costs(parameters, seconds)),
        section("Metrics by depth", _metrics(frame, found) if metrics else ""),
        section("Confirmed by mteb", _confirmed(frame)),
        section("The numbers", numbers + metric_tables(metrics)),
        section("How it was measured", facts({"Model": model, "Revision": revision, **how})),
    ]
    return document(title, lead, sections, notes=[*baseline_words(found, known), *found.remarks, *notes])


def _of_tasks(baselines: Baselines, tasks: set[str]) -> dict[str, dict[str, float]]:
    """Return the scores on some tasks, of the baselines that have any."""
    kept = {name: {task: one for task, one in of.items() if task in tasks} for name, of in baselines.items()}
    return {name: scores for name, scores in kept.items() if scores}


def _recipes(found: Mapping[str, Summary], baselines: Baselines) -> str:
    words = "Each recipe by layer, in points (score × 100). All else on this page is about the best recipe."
    table = soft("Each recipe at its best layer.") + plain_table(
        recipe_rows(found, baselines), label="Recipes at their best layers"
    )
    below = "How many points each layer of each recipe is below the best of all; the best layer of each is outlined."
    layers = [set(one.average.points) for one in found.values() if one.average]
    crossed = " A stroke: not scored." if any(some != set().union(*layers) for some in layers) else ""
    return (
        soft(words)
        + figure_html(Chart((recipes_panel(found, baselines),)))
        + table
        + soft(below + crossed)
        + strips_html(recipes_map(found))
    )


def _costs(parameters: Mapping[int, int], seconds: Mapping[int, float]) -> dict[int, str]:
    """Return what each layer costs, in words."""
    known: dict[int, dict[Cost, float]] = {layer: {"parameters": count} for layer, count in parameters.items()}
    for layer, time in seconds.items():
        known.setdefault(layer, {})["milliseconds"] = 1e3 * time
    return {layer: cost_words(costs) for layer, costs in known.items()}


def _score_sections(found: Summary, baselines: Baselines, costs: Mapping[int, str]) -> list[str]:
    if len(set().union(*(task.points for task in found.tasks))) < 2:
        return []  # one layer has no depth to draw: the table says it all
    average = wide_html(average_panel(found, baselines, costs), _average_words(found)) if found.average else ""
    tasks = ""
    if len(found.tasks) > 1 or not average:
        lines = zip(("dashed line", "dotted one", "one of dashes and dots"), baselines, strict=False)
        dashed = "".join(f"; the {line} is {name}" for line, name in lines)
        tasks = soft(f"Each task by layer, in points, on its own scale. Disc: best layer; square: last layer{dashed}.")
        tasks += figure_html(tasks_chart(found, baselines, costs))
    crossed = " A stroke: not scored." if found.incomplete else ""
    shared = " The scale is the same for all tasks." if len(found.tasks) > 1 else ""
    heat = soft(
        "How many points each layer is below the same task's best layer: the stronger the color, the nearer; the best "
        f"layer is outlined.{shared}{crossed}"
    )
    return [
        section("Score by depth", average + tasks),
        section("Layers and tasks", heat + strips_html(losses_panel(found))),
    ]


def _average_words(found: Summary) -> str:
    first = found.tasks[0]
    of = f"{first.name} ({first.measure})" if len(found.tasks) == 1 else f"Average of {len(found.tasks)} tasks"
    return (
        f"{of} by layer, in points (score × 100). The axis does not start at zero. The best layer is picked by the "
        "scores that it is shown with, so a gain of a fraction of a point may be luck."
    )


def _metrics(frame: pl.DataFrame, found: Summary) -> str:
    best = found.average.best_layer if found.average else None
    chart = metrics_chart(frame, chosen=best)
    upright = f" The upright line is layer {best}, the best by score." if best is not None else ""
    return soft(f"Each metric by layer, on its own scale.{upright}{broken_words(chart)}") + figure_html(chart)


def _confirmed(frame: pl.DataFrame) -> str:
    lines = confirmed_words(frame)
    if not lines:
        return ""
    words = "All layers were scored together; mteb's own evaluators scored these one by one, in points."
    return soft(words) + "".join(soft(line) for line in lines)
