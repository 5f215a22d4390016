"""The page of a tuned encoder: every layer before and after, the losses, and the metrics during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.frame.summaries import Curve, Summary, summary
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import number, signed
from midlayer_encoders.report.pages import render
from midlayer_encoders.report.training_page import plot_steps_curves, plot_steps_heat

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
    curves = _curves(_summaries(frame))
    figure, panels = drawing.panel_grid(len(curves))
    for axes, (name, by_time) in zip(panels, curves.items(), strict=True):
        for style, (time, curve) in enumerate(by_time.items()):
            x = list(curve.points)
            y = list(curve.points.values())
            tips = drawing.point_tips(f"{name} {time}", x, y, number)
            drawing.draw_points(axes, x, y, label=time, style=style, tips=tips)
        drawing.layer_axis(axes, max(curve.last_layer for curve in by_time.values()))
        ends = " to ".join(number(curve.last) for curve in by_time.values())
        label = f"{name} by layer, before and after; at the last from {ends}"
        drawing.set_title(axes, name, label, [f"{ends} at the last"])
    return drawing.finish(figure)


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
    scores = _summaries(frame)
    compared = len(scores) == 2
    return render(
        "tuning.html",
        title=title,
        notes=notes,
        verdict=tuning_words(frame, losses),
        folder=folder,
        scores_chart=plot_tuning(frame) if compared else None,
        curves=_curves(scores) if compared else {},
        loss_chart=_plot_losses(losses) if len(losses) > 1 else None,
        metric_charts=[] if metrics.is_empty() else [plot_steps_curves(metrics), plot_steps_heat(metrics)],
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


def _plot_losses(losses: pl.DataFrame) -> Figure:
    figure, (axes,) = drawing.panel_grid(1)
    for style, (column, label) in enumerate((("loss", "training"), ("held_out", "held-out pairs"))):
        rows = losses.drop_nulls(column)
        if len(rows):
            x = rows["step"].to_list()
            y = rows[column].to_list()
            tips = drawing.point_tips(label, x, y, x_label="step")
            drawing.draw_points(axes, x, y, label=label, style=style, tips=tips)
    last = float(losses["step"].max())  # type: ignore[arg-type]
    axes.set_xlim(-0.03 * last, 1.03 * last)
    axes.set_xticks([round(last * quarter / 4) for quarter in range(5)])
    axes.set_xlabel("step")
    drawing.set_title(axes, "loss")
    return drawing.finish(figure)
