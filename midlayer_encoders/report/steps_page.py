"""The page of a training history: metrics by layer and step, what changes, and what settles first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape

import numpy as np
import polars as pl

from midlayer_encoders.frame import Series, check_frame, number_of_layers
from midlayer_encoders.frame.steps import History, histories, layer_changes, settled, step_word, thinned
from midlayer_encoders.report.cells import cell_map
from midlayer_encoders.report.page import document, facts, section, sentences
from midlayer_encoders.report.panels import legend_list, panel_grid
from midlayer_encoders.report.steps import step_colours
from midlayer_encoders.report.svg import PANEL, Line, chart
from midlayer_encoders.report.tables import breakable, metric_tables
from midlayer_encoders.report.ticks import layer_ticks, number

__all__ = ["steps_html", "steps_words"]

_WITHIN = 0.1
_MOST = 32  # steps that are drawn: each point and cell has its text, and the page must open on a phone


def steps_html(
    frame: pl.DataFrame, *, title: str, how: Mapping[str, str], notes: Sequence[str] = (), within: float = _WITHIN
) -> str:
    """Return one self-contained page about one model's training.

    Args:
        frame: tidy, of one model, whose revisions name steps.
        title: heading of the page.
        how: what was measured and with what: versions, spec, seeds.
        notes: sentences to print below the verdict, such as revisions that failed.
        within: the share of a metric's range that counts as settled.
    """
    every = histories(frame)
    model, steps = str(frame["model"][0]), every[0].steps
    drawn = [_fewer(one) for one in every]
    changes = {one.title: [_mean_change(one, frame)] for one in every}
    sections = [
        section("Metrics by layer, a curve for each step", _fewer_words(steps) + _curves(drawn)),
        section("Layers and steps", _maps(drawn)),
        section("Which layers settle first", _changes(every, changes, settled(frame, within=within), within)),
        section(
            "The numbers",
            metric_tables({one.title: [_final(one)] for one in every}, caption=f"Metrics by layer at step {steps[-1]}")
            + metric_tables(changes, caption="Mean change between successive steps, % of the metric's range"),
        ),
        section("How it was measured", facts({"Model": model, "Steps": ", ".join(map(str, steps)), **how})),
    ]
    header = (
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(model)}, {len(steps)} steps from {steps[0]} to '
        f'{steps[-1]}</p><p class="verdict">{escape(" ".join(steps_words(frame, within=within)))}</p>'
        f"{sentences(notes)}</header>"
    )
    return document(title, f"{header}<main>{''.join(sections)}</main>", css=_step_rules(len(drawn[0].steps)))


def steps_words(frame: pl.DataFrame, *, within: float = _WITHIN) -> list[str]:
    """Return what a history says of early, middle and late layers, in a sentence or two.

    The layers are three groups by depth: up to a third, up to two thirds, and the rest.

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
    moved = layer_changes(frame).group_by(third).agg(100 * pl.col("relative").mean()).sort("third")
    by_third = dict(moved.iter_rows())
    if len(by_third) < 3:
        return []
    first, middle, last = (number(by_third[float(place)]) for place in range(3))
    words = [
        f"Between successive steps a layer moves by {first} % of the metric's range in the first third of the depth, "
        f"{middle} % in the middle and {last} % in the last."
    ]
    return [*words, *_settled_words(frame, third, within)]


def _settled_words(frame: pl.DataFrame, third: pl.Expr, within: float) -> list[str]:
    ends = settled(frame, within=within).group_by(third).agg(pl.col("step").quantile(0.5, "higher")).sort("third")
    shown = [step_word(int(step)) for step in ends["step"]]
    return [
        f"Half of the curves of each third stay within {100 * within:g} % of where they end from steps "
        f"{shown[0]}, {shown[1]} and {shown[2]} on, in the same order."
    ]


def _fewer(one: History) -> History:
    places = thinned(len(one.steps), _MOST)
    return replace(one, steps=tuple(one.steps[place] for place in places), values=one.values[places])


def _fewer_words(steps: Sequence[int]) -> str:
    drawn = len(thinned(len(steps), _MOST))
    words = f"{drawn} of the {len(steps)} steps are drawn here; all of them are in the numbers below and in the frame."
    return f'<p class="soft">{words}</p>' if drawn < len(steps) else ""


def _curves(every: Sequence[History]) -> str:
    steps = every[0].steps
    legend = legend_list({f"step {step_word(steps[place])}": place for place in thinned(len(steps), 10)})
    panels = [f"<figure>{_heading(one)}{_curve_chart(one)}</figure>" for one in every]
    words = (
        '<p class="soft">Each metric on its own scale. Colours run from the first step to the last, in their order.'
        f"{_gaps(every)}</p>"
    )
    return f'<div class="steps">{words}{legend}{panel_grid(panels)}</div>'


def _curve_chart(one: History) -> str:
    lines = [
        Line(
            list(zip(one.layers, values.tolist(), strict=True)),
            [f"step {step}, layer {k}: {v:.4g}" for k, v in zip(one.layers, values.tolist(), strict=True)],
            place,
        )
        for place, (step, values) in enumerate(zip(one.steps, one.values, strict=True))
    ]
    return chart(lines, one.layers[-1], size=PANEL, label=f"{one.title} by layer, a curve for each step")


def _maps(every: Sequence[History]) -> str:
    panels = []
    for one in every:
        finite = one.values[np.isfinite(one.values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        shown, layers = set(thinned(len(one.steps), 5)), set(layer_ticks(one.layers[-1], 6))
        drawn = cell_map(
            one.values.T,
            rows=[str(layer) if layer in layers else "" for layer in one.layers],
            columns=[step_word(step) if place in shown else "" for place, step in enumerate(one.steps)],
            tip=_tip(one),
            label=f"{one.title} by layer and step",
            low=low,
            high=high,
        )
        panels.append(f"<figure>{_heading(one, f'{low:.4g} (faint) to {high:.4g}')}{drawn}</figure>")
    words = "Layers upward, steps to the right in their order, equally far apart. A stroke: not measured."
    return f'<p class="soft">{words}</p>{panel_grid(panels)}'


def _tip(one: History) -> Callable[[int, int], str]:
    """Return what says the text of a cell of a history's map."""

    def tip(row: int, column: int) -> str:
        value = float(one.values[column, row])
        return f"{one.title}, step {one.steps[column]}, layer {one.layers[row]}: {value:.4g}"

    return tip


def _changes(
    every: Sequence[History], changes: Mapping[str, Sequence[Series]], ends: pl.DataFrame, within: float
) -> str:
    panels = []
    for one in every:
        mine = ends.filter((pl.col("name") == one.name) & (pl.col("dataset") == one.dataset))
        (series,) = changes[one.title]
        points = list(zip(series.layers, series.values, strict=True))
        drawn = chart(
            [Line(points, [f"layer {layer}: {value:.3g} %" for layer, value in points])],
            one.layers[-1],
            size=PANEL,
            label=f"{one.title}: mean change of each layer",
        )
        panels.append(f"<figure>{_heading(one, _first_and_last(mine))}{drawn}</figure>")
    words = (
        "How much each layer moves between a step and the next, on average, in percent of the metric's range over all "
        f"steps and layers. Settled: from that step on the layer stays within {100 * within:g} % of the range from its "
        "final value."
    )
    return f'<p class="soft">{words}</p>{panel_grid(panels)}'


def _first_and_last(ends: pl.DataFrame) -> str:
    if ends.is_empty():
        return "nothing was finite"
    early, late = ends["step"].min(), ends["step"].max()
    return "; ".join(
        f"{word} settled: {_some(ends.filter(pl.col('step') == step)['layer'].to_list())} at step {step_word(step)}"
        for word, step in (("first", early), ("last", late))
        if isinstance(step, int)
    )


def _some(layers: Sequence[int]) -> str:
    """Return layers as ranges: ``0–2, 24``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    words = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(words[:4])}{', …' if len(words) > 4 else ''}"


def _mean_change(one: History, frame: pl.DataFrame) -> Series:
    mine = frame.filter((pl.col("name") == one.name) & (pl.col("dataset") == one.dataset))
    mean = layer_changes(mine).group_by("layer").agg(percent=100 * pl.col("relative").mean()).sort("layer")
    return Series("", tuple(mean["layer"]), tuple(0.0 for _ in mean["layer"]), tuple(mean["percent"]))


def _final(one: History) -> Series:
    return Series("", one.layers, tuple(0.0 for _ in one.layers), tuple(one.values[-1].tolist()))


def _heading(one: History, words: str = "") -> str:
    return f"<figcaption><h3>{breakable(one.title)}</h3>{escape(words)}</figcaption>"


def _gaps(every: Sequence[History]) -> str:
    broken = [one.title for one in every if not np.isfinite(one.values).all()]
    return f" Not measured, or not finite, somewhere, and broken there: {escape(', '.join(broken))}." if broken else ""


def _step_rules(count: int) -> str:
    """Return the colours of the steps in CSS: those of the figures, and brighter ones on a dark ground."""
    from matplotlib.colors import to_hex

    light, dark = step_colours(count), step_colours(count, dark=True)
    rules = [
        "\n".join(f".steps .s{k} {{ --c: {to_hex(colours(k))}; --dash: none; }}" for k in range(count))
        for colours in (light, dark)
    ]
    return f"{rules[0]}\n@media screen and (prefers-color-scheme: dark) {{\n{rules[1]}\n}}\n"
