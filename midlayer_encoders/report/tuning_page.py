"""The page of a tuned encoder: every layer before and after, the losses, and the metrics while it learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.frame import Curve, Summary, summary
from midlayer_encoders.frame.steps import histories
from midlayer_encoders.report.axes import Axis, layer_axis
from midlayer_encoders.report.charts import Chart, Line, Panel, layer_tips, value_axis
from midlayer_encoders.report.matplotlib_figures import draw
from midlayer_encoders.report.page import document, facts, large, section, soft
from midlayer_encoders.report.page_figures import figure_html
from midlayer_encoders.report.steps import curves_chart, heat_chart
from midlayer_encoders.report.tables import plain_table
from midlayer_encoders.report.ticks import number, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_tuning", "tuning_html", "tuning_words"]

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
    """Return what tuning changed at the encoder's own layer, and of the loss on held-out pairs.

    Args:
        frame: tidy scores, ``revision`` is ``"before"`` or ``"after"``; it may be empty.
        losses: ``step, loss, held_out``.
    """
    words = []
    found = {} if frame.is_empty() else _summaries(frame)
    old, new = (found[when].average if when in found else None for when in _TIMES)
    if old is not None and new is not None:
        last = new.last_layer
        what = found["after"].tasks[0].name if len(found["after"].tasks) == 1 else "The tasks' average"
        words.append(
            f"{what} at layer {last} went from {number(old.points.get(last))} to {number(new.last)} points "
            f"({signed(new.last - old.points.get(last, float('nan')))})."
        )
    held = losses["held_out"].drop_nulls().to_list()
    if held:
        words.append(f"The loss on held-out pairs went from {held[0]:.3f} to {min(held):.3f} at its best.")
    return " ".join(words)


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
    """Return one self-contained page about a tuned encoder.

    Args:
        frame: as in :func:`tuning_words`.
        losses: likewise.
        metrics: tidy, revisions name steps.
        title: heading of the page.
        folder: of the plain model.
        how: what was trained, and with what.
        notes: sentences to print below the verdict.
    """
    steps = [] if metrics.is_empty() else histories(metrics)
    found = {} if frame.is_empty() else _summaries(frame)
    sections = [
        section("Use it", f'<pre><code>SentenceTransformer("{escape(folder)}")</code></pre>'),
        section("Every layer before and after", _scores(found) if len(found) == 2 else ""),
        section("The loss", figure_html(Chart((_losses_panel(losses),))) if len(losses) > 1 else ""),
        section("Metrics by layer while it learned", _metrics(steps) if steps else ""),
        section("How it was made", facts(how)),
    ]
    lead = large(tuning_words(frame, losses))
    return document(title, lead, sections, notes=notes, ordered=[len(one.steps) for one in steps[:1]])


def _summaries(frame: pl.DataFrame) -> dict[str, Summary]:
    parts = {when: frame.filter(pl.col("revision") == when) for when in _TIMES}
    return {when: summary(part) for when, part in parts.items() if not part.is_empty()}


def _curves(found: Mapping[str, Summary]) -> dict[str, dict[str, Curve]]:
    """Return the curves of the average and of each task, before and after."""
    several = len(found["after"].tasks) > 1
    by_time = {
        when: {
            curve.name: curve for curve in ([one.average] if several and one.average else []) + list(one.tasks)
        }
        for when, one in found.items()
    }  # fmt: skip
    names = [name for name in by_time["after"] if all(name in curves for curves in by_time.values())]
    return {name: {when: curves[name] for when, curves in by_time.items()} for name in names}


def _scores_chart(found: Mapping[str, Summary]) -> Chart:
    panels = []
    for name, by_time in _curves(found).items():
        lines = [
            Line(
                tuple(curve.points), tuple(curve.points.values()), when, place,
                layer_tips(f"{name} {when}", tuple(curve.points), tuple(curve.points.values()), number),
            )
            for place, (when, curve) in enumerate(by_time.items())
        ]  # fmt: skip
        last = max(layer for line in lines for layer in line.x)
        ends = " to ".join(number(line.y[-1]) for line in lines)
        label = f"{name} by layer, before and after; at the last from {ends}"
        panels.append(
            Panel(name, layer_axis(int(last)), value_axis(lines), tuple(lines), label, (f"{ends} at the last",))
        )
    return Chart(tuple(panels))


def _scores(found: Mapping[str, Summary]) -> str:
    words = "Points (score × 100) of each layer of the cut model; the last is the encoder's own, which was tuned."
    curves = _curves(found)
    layers = sorted(set().union(*(curve.points for by_time in curves.values() for curve in by_time.values())))
    rows = [["layer", *curves]]
    for layer in layers:
        pairs = [[by_time[when].points.get(layer, float("nan")) for when in _TIMES] for by_time in curves.values()]
        rows.append([str(layer), *(f"{number(old)} → {number(new)} ({signed(new - old)})" for old, new in pairs)])
    return soft(words) + figure_html(_scores_chart(found)) + plain_table(rows, label="Points by layer before and after")


def _losses_panel(losses: pl.DataFrame) -> Panel:
    lines = []
    for place, (column, label) in enumerate((("loss", "training"), ("held_out", "held-out pairs"))):
        known = losses.drop_nulls(column)
        if len(known):
            lines.append(Line(tuple(known["step"]), tuple(known[column]), label, place))
    last = float(losses["step"].max())  # type: ignore[arg-type]
    ticks = tuple((round(last * part / 4), f"{round(last * part / 4)}") for part in range(5))
    return Panel("loss", Axis("step", 0.0, last, ticks), value_axis(lines), tuple(lines))


def _metrics(steps: Sequence[object]) -> str:
    words = (
        "Measured on fixed texts, raw states, before the first step and whenever the steps have doubled. "
        "Colors run from the first step to the last."
    )
    every = list(steps)
    return soft(words) + figure_html(curves_chart(every)) + figure_html(heat_chart(every))  # type: ignore[arg-type]
