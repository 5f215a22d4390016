"""The pages and charts of training: metrics by layer and step, and a tuned encoder before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.frame.schema import check_frame, number_of_layers
from midlayer_encoders.frame.steps import History, histories, layer_changes, settled, step_of, step_word, thinned
from midlayer_encoders.frame.summaries import Curve, Summary, summary
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import number, signed
from midlayer_encoders.report.layer_charts import gap_text
from midlayer_encoders.report.pages import Column, block, figure_html, metric_column, page_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIMES = ("before", "after")
_TEACHER = "teacher"
_MIN_LEAD = 0.5  # points of a teacher over its student
_WITHIN = 0.1
_MAX_STEPS = 32  # drawn on a page, which has to open on a phone


def steps_html(
    frame: pl.DataFrame, *, title: str, how: Mapping[str, str], notes: Sequence[str] = (), within: float = _WITHIN
) -> str:
    """Return a self-contained page about the training of one model.

    Args:
        frame: tidy, of one model, whose revisions name steps.
        title: of the page.
        how: facts about the measurement: versions, spec, seeds.
        notes: sentences below the verdict, such as failed revisions.
        within: the share of a metric's range within which a layer counts as settled.
    """
    measured = histories(frame)
    model, steps = str(frame["model"][0]).removeprefix("local/"), measured[0].steps
    places = thinned(len(steps), _MAX_STEPS)
    drawn_steps = {steps[place] for place in places}
    drawn = frame.filter(pl.col("revision").map_elements(step_of, pl.Int64).is_in(drawn_steps))
    curves = plot_steps_curves(drawn)
    omitted = f"{len(places)} of the {len(steps)} steps are drawn here; all are in the numbers below and in the frame."
    gaps = gap_text(curves, "Not measured, or not finite, somewhere")
    sections: dict[str, list[str]] = {
        "Metrics by layer, a curve for each step": [
            omitted if len(places) < len(steps) else "",
            f"Each metric on its own scale. Colors run from the first step to the last.{gaps}",
            figure_html(curves, meanings=True),
        ],
        "The numbers, and which layers settle first": [
            "A layer changes between successive steps by a share of the metric's range over all steps and layers. It "
            f"has settled at the step from which it stays within {100 * within:g} % of the range of its final value.",
            *(block("layer_table", *table) for table in _tables(frame, measured, within).items()),
        ],
        "How it was measured": [block("facts", {"Model": model, "Steps": ", ".join(map(str, steps)), **how})],
    }
    subtitle = f"{model}, {len(steps)} steps from {steps[0]} to {steps[-1]}"
    return page_html(title, [" ".join(steps_words(frame, within=within))], sections, subtitle=subtitle, notes=notes)


def steps_words(frame: pl.DataFrame, *, within: float = _WITHIN) -> list[str]:
    """Return sentences about the first, middle and last third of the layers.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> values = {1: [5.0, 1.0, 3.0], 2: [5.0, 3.0, 3.0]}
        >>> cells = [(step, k, value) for step, row in values.items() for k, value in enumerate(row)]
        >>> rows = [("m", f"step{step}", k, k / 2, "metric", "t", "dime", value) for step, k, value in cells]
        >>> steps_words(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))[0]
        "Between successive steps a layer moves by 0.0 % of the metric's range in the first third of the depth, 50.0 % \
in the middle and 0.0 % in the last."
    """
    frame = check_frame(frame)
    depth = max(number_of_layers(frame), 1)
    third = pl.min_horizontal(pl.col("layer") * 3 / depth, 2.999).floor().alias("third")
    changes = layer_changes(frame).group_by(third).agg(100 * pl.col("relative").mean()).sort("third")
    by_third = dict(changes.iter_rows())
    if len(by_third) < 3:
        return []
    first, middle, last = (number(by_third[float(place)]) for place in range(3))
    ends = settled(frame, within=within).group_by(third).agg(pl.col("step").quantile(0.5, "higher")).sort("third")
    steps = [step_word(int(step)) for step in ends["step"]]
    return [
        f"Between successive steps a layer moves by {first} % of the metric's range in the first third of the depth, "
        f"{middle} % in the middle and {last} % in the last.",
        f"Half of the curves of each third stay within {100 * within:g} % of where they end from steps "
        f"{steps[0]}, {steps[1]} and {steps[2]} on, in the same order.",
    ]


def plot_steps_curves(frame: pl.DataFrame) -> Figure:
    """Return a figure with a panel for each metric by layer and a curve for each step: dark is early, bright is late.

    Colors are equally spaced over the steps, whatever their distances. The legend names at most ten steps.

    Args:
        frame: tidy, of one model, whose revisions name steps. Values that are not finite break a curve.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "lidar", s + k) for s in (1, 2) for k in (0, 1)]
        >>> figure = plot_steps_curves(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[1.0, 2.0], [2.0, 3.0]]
    """
    measured = histories(frame)
    steps = measured[0].steps
    labels = {place: f"step {step_word(steps[place])}" for place in thinned(len(steps), 10)}
    figure, panels = drawing.panel_grid(len(measured))
    for axes, history in zip(panels, measured, strict=True):
        for style, (step, values) in enumerate(zip(steps, history.values.tolist(), strict=True)):
            tips = drawing.point_tips(f"step {step}", history.layers, values)
            label = labels.get(style, "")
            drawing.draw_points(axes, history.layers, values, label=label, style=style, tips=tips, ordered=len(steps))
        drawing.layer_axis(axes, history.layers[-1])
        drawing.set_title(axes, history.title)
    return drawing.finish(figure)


def _rows_of(frame: pl.DataFrame, history: History) -> pl.DataFrame:
    return frame.filter(name=history.name, dataset=history.dataset)


def _tables(frame: pl.DataFrame, measured: Sequence[History], within: float) -> dict[str, list[Column]]:
    tables: dict[str, list[Column]] = {}
    ends = settled(frame, within=within)
    for history in measured:
        final = dict(zip(history.layers, history.values[-1].tolist(), strict=True))
        changes = layer_changes(_rows_of(frame, history)).group_by("layer").agg(100 * pl.col("relative").mean())
        captions = {
            f"Metrics by layer at step {history.steps[-1]}": final,
            "Mean change between successive steps, % of the metric's range": dict(changes.sort("layer").iter_rows()),
        }
        for caption, values in captions.items():
            tables.setdefault(caption, []).append(metric_column(history.title, values, values.values()))
        steps = {layer: str(step) for layer, step in _rows_of(ends, history).select("layer", "step").iter_rows()}
        tables.setdefault("The step from which each layer is settled", []).append(Column(history.title, steps))
    return tables


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
            x, y = zip(*curve.points.items(), strict=True)
            tips = drawing.point_tips(f"{name} {time}", x, y, number)
            drawing.draw_points(axes, x, y, label=time, style=style, tips=tips)
        if name in teacher:
            drawing.draw_level(axes, teacher[name], f"{name}, teacher: {number(teacher[name])}", "teacher")
        drawing.layer_axis(axes, max(curve.last_layer for curve in by_time.values()))
        ends = " to ".join(number(curve.last) for curve in by_time.values())
        drawing.set_title(axes, name, [f"{ends} at the last"])
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
            f"({signed(after.last - before.points.get(last, float('nan')))})."
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
    code = f"from sentence_transformers import SentenceTransformer\nSentenceTransformer({json.dumps(folder)})"
    sections: dict[str, list[str]] = {"Use it": [block("code", {"": code})]}
    if len(scores) == 2:
        sections["Every layer before and after"] = [
            "Points (score × 100) of each layer of the cut model; the last is the encoder's own, which was trained.",
            figure_html(plot_tuning(frame)),
            block("layer_table", "Points by layer before and after", *_tuning_table(frame, scores)),
        ]
    if len(losses) > 1:
        sections["The loss"] = [figure_html(_plot_losses(losses))]
    if not metrics.is_empty():
        sections["Metrics by layer while it learned"] = [
            "Measured on fixed texts, raw states, before the first step and whenever the steps have doubled. Colors "
            "run from the first step to the last.",
            figure_html(plot_steps_curves(metrics), meanings=True),
        ]
    sections["How it was made"] = [block("facts", how)]
    return page_html(title, [tuning_words(frame, losses)], sections, notes=notes)


def _tuning_table(frame: pl.DataFrame, scores: Mapping[str, Summary]) -> tuple[list[Column], None, list[str]]:
    """Return the columns of the scores before and after, no layer to highlight, and the name of the last row."""
    teacher = teacher_scores(frame)
    columns = []
    for name, by_time in _curves(scores).items():
        before, after = by_time["before"].points, by_time["after"].points
        texts = {
            layer: f"{number(before.get(layer))} → {number(after.get(layer))}"
            + (f" ({signed(after[layer] - before[layer])})" if layer in before and layer in after else "")
            for layer in before.keys() | after.keys()
        }
        columns.append(Column(name, texts, feet=[number(teacher.get(name))]))
    return columns, None, [_TEACHER] if teacher else []


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
