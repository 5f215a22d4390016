"""The page of a tuned encoder: every layer before and after, the losses, and the metrics during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.frame import Curve, Summary, summary
from midlayer_encoders.frame.steps import histories
from midlayer_encoders.report import charts
from midlayer_encoders.report.drawing import draw
from midlayer_encoders.report.labels import number, signed
from midlayer_encoders.report.pages import render
from midlayer_encoders.report.training_page import curves_chart, heat_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIMES = ("before", "after")


def plot_tuning(frame: pl.DataFrame) -> Figure:
    """Return a figure of the scores by layer before and after: a panel for the average and for each task.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> values = {"before": [0.4, 0.5], "after": [0.5, 0.7]}
        >>> rows = [("m", w, k, k, "score", "STS", "r", v[k]) for w, v in values.items() for k in (0, 1)]
        >>> figure = plot_tuning(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[40.0, 50.0], [50.0, 70.0]]
    """
    return draw(_scores_chart(_summaries(frame)))


def tuning_words(frame: pl.DataFrame, losses: pl.DataFrame) -> str:
    """Return sentences about the change at the encoder's layer and of the loss on held-out pairs.

    Args:
        frame: tidy scores whose ``revision`` is ``"before"`` or ``"after"``; may be empty.
        losses: ``step, loss, held_out``.
    """
    sentences = []
    scores = _summaries(frame)
    before, after = (scores[time].average if time in scores else None for time in _TIMES)
    if before is not None and after is not None:
        last = after.last_layer
        tasks = scores["after"].tasks
        subject = tasks[0].name if len(tasks) == 1 else "The tasks' average"
        sentences.append(
            f"{subject} at layer {last} went from {number(before.points.get(last))} to {number(after.last)} points "
            f"({signed(after.last - before.points.get(last, float('nan')))})."
        )
    held_out = losses["held_out"].drop_nulls().to_list()
    if held_out:
        sentences.append(f"The loss on held-out pairs went from {held_out[0]:.3f} to {min(held_out):.3f} at its best.")
    return " ".join(sentences)


def tuning_html(
    frame: pl.DataFrame,
    losses: pl.DataFrame,
    metrics: pl.DataFrame,
    *,
    title: str,
    folder: str,
    how: Mapping[str, str],
    notes: Sequence[str] = (),
) -> str:
    """Return a self-contained page about a tuned encoder.

    Args:
        frame: as in :func:`tuning_words`.
        losses: as in :func:`tuning_words`.
        metrics: tidy, with revisions that name steps; may be empty.
        title: of the page.
        folder: of the saved model.
        how: facts about the training.
        notes: sentences below the verdict.
    """
    measured = [] if metrics.is_empty() else histories(metrics)
    scores = _summaries(frame)
    compared = len(scores) == 2
    return render(
        "tuning.html",
        title=title,
        notes=notes,
        verdict=tuning_words(frame, losses),
        folder=folder,
        scores_chart=_scores_chart(scores) if compared else None,
        score_rows=_score_rows(scores) if compared else [],
        loss_chart=charts.Chart((_losses_panel(losses),)) if len(losses) > 1 else None,
        metric_charts=[curves_chart(measured), heat_chart(measured)] if measured else [],
        how=how,
    )


def _summaries(frame: pl.DataFrame) -> dict[str, Summary]:
    parts = {time: frame.filter(pl.col("revision") == time) for time in _TIMES}
    return {time: summary(part) for time, part in parts.items() if not part.is_empty()}


def _curves(scores: Mapping[str, Summary]) -> dict[str, dict[str, Curve]]:
    """Return the curves before and after of the average and of each task."""
    several = len(scores["after"].tasks) > 1
    by_time = {}
    for time, result in scores.items():
        averages = [result.average] if several and result.average else []
        by_time[time] = {curve.name: curve for curve in (*averages, *result.tasks)}
    names = [name for name in by_time["after"] if all(name in curves for curves in by_time.values())]
    return {name: {time: curves[name] for time, curves in by_time.items()} for name in names}


def _scores_chart(scores: Mapping[str, Summary]) -> charts.Chart:
    panels = []
    for name, by_time in _curves(scores).items():
        lines = []
        for style, (time, curve) in enumerate(by_time.items()):
            layers, values = tuple(curve.points), tuple(curve.points.values())
            lines.append(
                charts.Line(layers, values, time, style, charts.layer_tips(f"{name} {time}", layers, values, number))
            )
        last = max(layer for line in lines for layer in line.x)
        ends = " to ".join(number(line.y[-1]) for line in lines)
        label = f"{name} by layer, before and after; at the last from {ends}"
        caption = (f"{ends} at the last",)
        panels.append(
            charts.Panel(name, charts.layer_axis(int(last)), charts.value_axis(lines), tuple(lines), label, caption)
        )
    return charts.Chart(tuple(panels))


def _score_rows(scores: Mapping[str, Summary]) -> list[list[str]]:
    curves = _curves(scores)
    layers = sorted(set().union(*(curve.points for by_time in curves.values() for curve in by_time.values())))
    rows = [["layer", *curves]]
    for layer in layers:
        pairs = [[by_time[time].points.get(layer, float("nan")) for time in _TIMES] for by_time in curves.values()]
        cells = (f"{number(before)} → {number(after)} ({signed(after - before)})" for before, after in pairs)
        rows.append([str(layer), *cells])
    return rows


def _losses_panel(losses: pl.DataFrame) -> charts.Panel:
    lines = []
    for style, (column, label) in enumerate((("loss", "training"), ("held_out", "held-out pairs"))):
        rows = losses.drop_nulls(column)
        if len(rows):
            lines.append(charts.Line(tuple(rows["step"]), tuple(rows[column]), label, style))
    last = float(losses["step"].max())  # type: ignore[arg-type]
    ticks = tuple((round(last * quarter / 4), f"{round(last * quarter / 4)}") for quarter in range(5))
    return charts.Panel("loss", charts.Axis("step", 0.0, last, ticks), charts.value_axis(lines), tuple(lines))
