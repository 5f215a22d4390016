"""The page of a training history: metrics by layer and step, what changes, and what settles first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import polars as pl

from midlayer_encoders.frame import Series, check_frame, number_of_layers
from midlayer_encoders.frame.steps import History, histories, layer_changes, settled, step_word, thinned
from midlayer_encoders.report.metrics import broken_words
from midlayer_encoders.report.page import document, facts, large, section, soft
from midlayer_encoders.report.page_figures import figure_html
from midlayer_encoders.report.steps import change_chart, curves_chart, heat_chart, mean_changes
from midlayer_encoders.report.tables import metric_tables
from midlayer_encoders.report.ticks import number

__all__ = ["steps_html", "steps_words"]

_WITHIN = 0.1
_MOST = 32  # steps that are drawn: each point and cell has its text, and the page must open on a phone
_MAP_WORDS = "Layers upward, steps to the right in their order, equally far apart. A stroke: not measured."
_CHANGE_WORDS = (
    "How much each layer moves between a step and the next, on average, in percent of the metric's range over all "
    "steps and layers. Settled: from that step on the layer stays within {:g} % of the range from its final value."
)


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
    sections = [
        section("Metrics by layer, a curve for each step", _curves(drawn, len(steps))),
        section("Layers and steps", soft(_MAP_WORDS) + figure_html(heat_chart(drawn))),
        section(
            "Which layers settle first",
            soft(_CHANGE_WORDS.format(100 * within)) + figure_html(change_chart(frame, within=within)),
        ),
        section("The numbers", _tables(frame, every)),
        section("How it was measured", facts({"Model": model, "Steps": ", ".join(map(str, steps)), **how})),
    ]
    lead = soft(f"{model}, {len(steps)} steps from {steps[0]} to {steps[-1]}")
    lead += large(" ".join(steps_words(frame, within=within)))
    return document(title, lead, sections, notes=notes, ordered=[len(drawn[0].steps)])


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


def _curves(every: Sequence[History], count: int) -> str:
    chart, drawn = curves_chart(every), len(every[0].steps)
    words = f"{drawn} of the {count} steps are drawn here; all of them are in the numbers below and in the frame."
    broken = broken_words(chart, "Not measured, or not finite, somewhere")
    scale = f"Each metric on its own scale. Colors run from the first step to the last, in their order.{broken}"
    return (soft(words) if drawn < count else "") + soft(scale) + figure_html(chart)


def _tables(frame: pl.DataFrame, every: Sequence[History]) -> str:
    final = {one.title: [_series(dict(zip(one.layers, one.values[-1].tolist(), strict=True)))] for one in every}
    changes = {one.title: [_series(mean_changes(frame, one))] for one in every}
    return metric_tables(final, caption=f"Metrics by layer at step {every[0].steps[-1]}") + metric_tables(
        changes, caption="Mean change between successive steps, % of the metric's range"
    )


def _series(values: Mapping[int, float]) -> Series:
    return Series("", tuple(values), tuple(0.0 for _ in values), tuple(values.values()))
