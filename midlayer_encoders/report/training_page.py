"""The page and the chart of training: metrics by layer and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.frame.schema import check_frame, number_of_layers
from midlayer_encoders.frame.steps import History, evenly_spaced, histories, layer_changes, settled, step_of, step_word
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import number, significant
from midlayer_encoders.report.layer_charts import gap_text
from midlayer_encoders.report.pages import Texts, block, figure_html, layer_table, page_html

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
    model, steps = str(frame["model"][0]).removeprefix("local/"), measured[0].steps
    drawn = [steps[place] for place in evenly_spaced(len(steps), _MAX_STEPS)]
    curves = plot_steps_curves(frame.filter(pl.col("revision").map_elements(step_of, pl.Int64).is_in(drawn)))
    sections: dict[str, list[str]] = {
        "Metrics by layer, a curve for each step": [
            f"{len(drawn)} of {len(steps)} steps, each metric on its own scale. Colors run from the first step to the "
            f"last.{gap_text(curves, 'Not measured, or not finite, somewhere')}",
            figure_html(curves, meanings=True),
        ],
        "The numbers, and which layers settle first": [
            "A layer changes between successive steps by a share of the metric's range over all steps and layers. It "
            f"has settled at the step from which it stays within {100 * within:g} % of the range of its final value.",
            *(layer_table(*table) for table in _tables(frame, measured, within).items()),
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
    labels = {place: f"step {step_word(steps[place])}" for place in evenly_spaced(len(steps), 10)}
    panels = {
        history.title: [
            drawing.Line(history.layers, values, labels.get(style, ""), style)
            for style, values in enumerate(history.values.tolist())
        ]
        for history in measured
    }
    return drawing.plot_panels(panels, max(history.layers[-1] for history in measured), ordered=len(steps))


def _tables(frame: pl.DataFrame, measured: Sequence[History], within: float) -> dict[str, dict[str, Texts]]:
    """Return the columns of each table by its caption."""
    ends = settled(frame, within=within)
    relative = 100 * pl.col("relative").mean()
    changes = layer_changes(frame).group_by("name", "dataset", "layer").agg(relative).sort("layer")
    captions = {
        f"Metrics by layer at step {measured[0].steps[-1]}": ends.select("name", "dataset", "layer", "final"),
        "Mean change between successive steps, % of the metric's range": changes,
        "The step from which each layer is settled": ends.select("name", "dataset", "layer", "step"),
    }
    tables: dict[str, dict[str, Texts]] = {}
    for caption, rows in captions.items():
        for history in measured:
            cells = rows.filter(name=history.name, dataset=history.dataset).drop("name", "dataset").iter_rows()
            texts = {layer: str(x) if isinstance(x, int) else significant(x, zeros=True) for layer, x in cells}
            tables.setdefault(caption, {})[history.title] = texts
    return tables
