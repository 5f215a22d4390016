"""The page and the charts of a tuned encoder before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.frame.summaries import Curve, Summary, summary
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import format_signed, number
from midlayer_encoders.report.pages import Texts, figure_html, layer_table
from midlayer_encoders.report.training_page import plot_steps_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIMES = ("before", "after")
_TEACHER = "teacher"
_MIN_LEAD = 0.5  # points of a teacher over its student


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
    teacher = teacher_scores(frame)
    figure, panels = drawing.panel_grid(len(curves))
    for axes, (name, by_time) in zip(panels, curves.items(), strict=True):
        for style, (time, curve) in enumerate(by_time.items()):
            drawing.draw_points(axes, list(curve.points), list(curve.points.values()), label=time, style=style)
        if name in teacher:
            drawing.draw_level(axes, teacher[name], _TEACHER)
        drawing.layer_axis(axes, max(curve.last_layer for curve in by_time.values()))
        ends = " to ".join(number(curve.last) for curve in by_time.values())
        drawing.set_title(axes, name, f"{ends} at the last")
    return drawing.finish(figure)


def tuning_words(frame: pl.DataFrame, losses: pl.DataFrame) -> str:
    """Return sentences about the change at the encoder's layer, the teacher and the held-out loss.

    Args:
        frame: tidy scores whose ``revision`` is ``"before"``, ``"after"`` or ``"teacher"``; may be empty.
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
            f"({format_signed(after.last - before.points.get(last, float('nan')))})."
        )
        if (teacher := teacher_scores(frame).get(after.name)) is not None:
            sentences.append(_gap_sentence(before.points.get(last, float("nan")), after.last, teacher))
    held_out = losses["held_out"].drop_nulls().to_list()
    if len(held_out) > 1:
        first, best = held_out[0], min(held_out[1:])  # the weights before training are not a checkpoint
        sentences.append(f"The held-out loss went from {first:.3f} to {best:.3f} at its best.")
        if best >= first:
            sentences.append("It did not fall: training did not help. Try a lower learning rate, or more texts.")
    return " ".join(sentences)


def _gap_sentence(before: float, after: float, teacher: float) -> str:
    """Return a sentence about the share of a teacher's lead that training recovered."""
    if teacher - before < _MIN_LEAD:
        return f"The teacher, with {number(teacher)}, was not better."
    if after >= teacher:
        return f"The teacher has {number(teacher)}: training recovered all of its lead."
    share = max(round(100 * (after - before) / (teacher - before)), 0)
    return f"The teacher has {number(teacher)}: training recovered {share} % of its lead."


def teacher_scores(frame: pl.DataFrame) -> dict[str, float]:
    """Return the scores of a teacher by the names of the tasks, and of their average if there are several."""
    rows = frame.filter(pl.col("revision") == _TEACHER)
    if rows.is_empty():
        return {}
    result = summary(rows)
    curves = (*([result.average] if result.average else []), *result.tasks)
    return {curve.name: curve.last for curve in curves}


def tuning_sections(frame: pl.DataFrame, losses: pl.DataFrame, metrics: pl.DataFrame) -> dict[str, list[str]]:
    """Return the sections of the page about the scores, the loss and the metrics in training.

    Args:
        frame: as in :func:`tuning_words`.
        losses: as in :func:`tuning_words`.
        metrics: tidy, with revisions that name steps; may be empty.
    """
    scores = _summaries(frame)
    sections = {}
    if len(scores) == 2:
        sections["Every layer before and after"] = [
            "Points (score × 100) of each layer of the cut model; the last is the encoder's own, which was trained.",
            figure_html(plot_tuning(frame)),
            layer_table("Points by layer before and after", _tuning_table(frame, scores)),
        ]
    if len(losses) > 1:
        sections["The loss"] = [figure_html(_plot_losses(losses))]
    if not metrics.is_empty():
        sections["Metrics by layer while it learned"] = [
            "Measured on fixed texts, raw states, before the first step and whenever the steps have doubled. Colors "
            "run from the first step to the last.",
            figure_html(plot_steps_curves(metrics), meanings=True),
        ]
    return sections


def _tuning_table(frame: pl.DataFrame, scores: Mapping[str, Summary]) -> dict[str, Texts]:
    """Return the scores before and after by layer, and the teacher's, for the average and each task."""
    teacher = teacher_scores(frame)
    columns = {}
    for name, by_time in _curves(scores).items():
        before, after = by_time["before"].points, by_time["after"].points
        texts: Texts = {
            layer: f"{number(before.get(layer))} → {number(after.get(layer))}"
            + (f" ({format_signed(after[layer] - before[layer])})" if layer in before and layer in after else "")
            for layer in before.keys() | after.keys()
        }
        columns[name] = texts | ({_TEACHER: number(teacher.get(name))} if teacher else {})
    return columns


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
    for style, (column, label) in enumerate((("loss", "training"), ("held_out", "held out"))):
        rows = losses.drop_nulls(column)
        if len(rows):
            drawing.draw_points(axes, rows["step"].to_list(), rows[column].to_list(), label=label, style=style)
    last = float(losses["step"].max())  # type: ignore[arg-type]
    axes.set_xlim(-0.03 * last, 1.03 * last)
    axes.set_xticks([round(last * quarter / 4) for quarter in range(5)])
    axes.set_xlabel("step")
    drawing.set_title(axes, "loss")
    return drawing.finish(figure)
