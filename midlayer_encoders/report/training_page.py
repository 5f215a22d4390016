"""The page and the charts of a training run: metrics by layer and step, and the steps at which layers settle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from midlayer_encoders.frame import Series, check_frame, number_of_layers, spans
from midlayer_encoders.frame.steps import History, histories, layer_changes, settled, step_word, thinned
from midlayer_encoders.report import charts
from midlayer_encoders.report.drawing import draw
from midlayer_encoders.report.labels import number, significant
from midlayer_encoders.report.layer_charts import gap_text
from midlayer_encoders.report.pages import LayerTable, metric_table, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    model, steps = str(frame["model"][0]), measured[0].steps
    places = thinned(len(steps), _MAX_STEPS)
    drawn = [
        replace(history, steps=tuple(steps[place] for place in places), values=history.values[places])
        for history in measured
    ]
    curves = curves_chart(drawn)
    return render(
        "training.html",
        title=title,
        notes=notes,
        model=model,
        steps=steps,
        verdict=" ".join(steps_words(frame, within=within)),
        num_drawn=len(places),
        curves_chart=curves,
        gaps=gap_text(curves, "Not measured, or not finite, somewhere"),
        heat_chart=heat_chart(drawn),
        change_chart=change_chart(frame, within=within),
        percent=f"{100 * within:g}",
        tables=_tables(frame, measured),
        how={"Model": model, "Steps": ", ".join(map(str, steps)), **how},
    )


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


def plot_steps_heat(frame: pl.DataFrame) -> Figure:
    """Return a heat map for each metric: layers upward, steps to the right, equally spaced.

    Args:
        frame: tidy, of one model, whose revisions name steps. Values that are not finite are gray.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "lidar", s + k) for s in (1, 2) for k in (0, 1)]
        >>> figure = plot_steps_heat(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> figure.axes[0].get_title(loc="left"), figure.axes[0].collections[0].get_array().tolist()
        ('lidar', [[1.0, 2.0], [2.0, 3.0]])
    """
    return draw(heat_chart(histories(frame)))


def plot_steps_curves(frame: pl.DataFrame) -> Figure:
    """Return a figure with a panel for each metric by layer and a curve for each step: dark is early, bright is late.

    Colors are equally spaced over the steps, whatever their distances.

    Args:
        frame: tidy, of one model, whose revisions name steps. Values that are not finite break a curve.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "lidar", s + k) for s in (1, 2) for k in (0, 1)]
        >>> figure = plot_steps_curves(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[1.0, 2.0], [2.0, 3.0]]
    """
    return draw(curves_chart(histories(frame)))


def plot_steps_change(frame: pl.DataFrame, *, within: float = 0.1) -> Figure:
    """Return a figure with two panels for each metric: how much each layer changes, and when it settles.

    The upper panel shows the mean of :func:`layer_changes` over successive steps, in percent of the metric's range, the
    lower panel the step of :func:`settled`.

    Args:
        frame: tidy, of one model, whose revisions name steps, two or more.
        within: the share of the metric's range within which a layer counts as settled.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> values = {1: (5.0, 1.0), 2: (5.0, 3.0)}
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "dime", v[k]) for s, v in values.items() for k in (0, 1)]
        >>> figure = plot_steps_change(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> figure.axes[0].lines[0].get_ydata().tolist()
        [0.0, 50.0]
    """
    return draw(change_chart(frame, within=within))


def heat_chart(measured: Sequence[History]) -> charts.Chart:
    """Return a heat map of layers and steps for each history."""
    return charts.Chart(tuple(_heat_panel(history) for history in measured))


def curves_chart(measured: Sequence[History]) -> charts.Chart:
    """Return a panel for each history with a curve for each step; the legend names at most ten steps."""
    steps = measured[0].steps
    labels = {place: f"step {step_word(steps[place])}" for place in thinned(len(steps), 10)}
    panels = []
    for history in measured:
        rows = map(tuple, history.values.tolist())
        lines = tuple(
            charts.Line(
                history.layers,
                values,
                labels.get(style, ""),
                style,
                charts.layer_tips(f"step {step}", history.layers, values),
            )
            for style, (step, values) in enumerate(zip(history.steps, rows, strict=True))
        )
        label = f"{history.title} by layer, a curve for each step"
        x = charts.layer_axis(history.layers[-1])
        panels.append(charts.Panel(history.title, x, charts.value_axis(lines), lines, label, ordered=len(steps)))
    return charts.Chart(tuple(panels))


def change_chart(frame: pl.DataFrame, *, within: float) -> charts.Chart:
    """Return two panels for each history: the mean change of each layer, and the step from which it is settled."""
    ends = settled(frame, within=within)
    panels = []
    for history in histories(frame):
        history_ends = ends.filter(pl.col("name") == history.name, pl.col("dataset") == history.dataset)
        changes = mean_changes(frame, history)
        panels += [_change_panel(history, changes, history_ends), _settled_panel(history, history_ends, within)]
    return charts.Chart(tuple(panels), size=(3.2, 1.9), stack=2)


def mean_changes(frame: pl.DataFrame, history: History) -> dict[int, float]:
    """Return the mean change of each layer between successive steps, in percent of the metric's range."""
    rows = frame.filter(pl.col("name") == history.name, pl.col("dataset") == history.dataset)
    mean = layer_changes(rows).group_by("layer").agg(100 * pl.col("relative").mean()).sort("layer")
    return dict(mean.iter_rows())


def _heat_panel(history: History) -> charts.Panel:
    finite = history.values[np.isfinite(history.values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    values = tuple(map(tuple, history.values.T.tolist()))
    tips = tuple(
        tuple(
            f"{history.title}, step {step}, layer {layer}: {significant(value)}"
            for step, value in zip(history.steps, row, strict=True)
        )
        for layer, row in zip(history.layers, values, strict=True)
    )
    return charts.Panel(
        history.title,
        charts.place_axis("step", [step_word(step) for step in history.steps], 5),
        charts.place_axis("layer", history.layers),
        (charts.Cells(values, tips, charts.Scale(low, high, (significant(low), significant(high)))),),
        label=f"{history.title} by layer and step",
    )


def _change_panel(history: History, changes: Mapping[int, float], ends: pl.DataFrame) -> charts.Panel:
    tips = tuple(f"layer {layer}: {value:.3g} %" for layer, value in changes.items())
    return charts.Panel(
        history.title,
        charts.layer_axis(history.layers[-1], room=0.6),  # as wide as the bars below it
        charts.Axis("change, % of range", 0, 1.1 * max(changes.values(), default=0.0) or 1.0),
        (charts.Line(tuple(changes), tuple(changes.values()), tips=tips),),
        label=f"{history.title}: mean change of each layer",
        caption=(_first_and_last(ends),),
    )


def _settled_panel(history: History, ends: pl.DataFrame, within: float) -> charts.Panel:
    places = tuple(history.steps.index(step) for step in ends["step"])
    tips = tuple(f"layer {layer}: step {step}" for layer, step in ends.select("layer", "step").iter_rows())
    ticks = tuple((place, step_word(history.steps[place])) for place in thinned(len(history.steps), 4))
    return charts.Panel(
        f"settled within {100 * within:g} % from step",
        charts.layer_axis(history.layers[-1], room=0.6),
        charts.Axis("step", -0.6, len(history.steps) - 0.4, ticks),
        (charts.Bars(tuple(ends["layer"]), places, -0.6, tips),),
        label=f"{history.title}: the step from which each layer is settled",
    )


def _first_and_last(ends: pl.DataFrame) -> str:
    if ends.is_empty():
        return "nothing was finite"
    texts = []
    for order, step in (("first", min(ends["step"])), ("last", max(ends["step"]))):
        layers = tuple(ends.filter(pl.col("step") == step)["layer"].sort())
        noun = "layers" if len(layers) > 1 else "layer"
        texts.append(f"{order} settled: {noun} {spans(layers)} at step {step_word(step)}")
    return "; ".join(texts)


def _tables(frame: pl.DataFrame, measured: Sequence[History]) -> list[LayerTable]:
    final = {
        history.title: [_series(dict(zip(history.layers, history.values[-1].tolist(), strict=True)))]
        for history in measured
    }
    changes = {history.title: [_series(mean_changes(frame, history))] for history in measured}
    return [
        metric_table(final, caption=f"Metrics by layer at step {measured[0].steps[-1]}"),
        metric_table(changes, caption="Mean change between successive steps, % of the metric's range"),
    ]


def _series(values: Mapping[int, float]) -> Series:
    return Series("", tuple(values), tuple(0.0 for _ in values), tuple(values.values()))
