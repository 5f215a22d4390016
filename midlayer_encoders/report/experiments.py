"""What the paper's experiments draw: panels of curves, of rules and of theorems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import check_frame
from midlayer_encoders.frame.steps import histories
from midlayer_encoders.report.axes import Axis, layer_axis, named_axis
from midlayer_encoders.report.charts import Chart, Dots, Line, Panel, Part, Rule, Word, value_axis
from midlayer_encoders.report.correlations import correlation_panels
from midlayer_encoders.report.matplotlib_figures import draw
from midlayer_encoders.report.metrics import metrics_chart
from midlayer_encoders.report.steps import curves_chart
from midlayer_encoders.report.ticks import padded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "along_panels",
    "correlation_figure",
    "curves_panel",
    "metric_depth_panels",
    "order_panels",
    "panels_chart",
    "panels_figure",
    "prompt_panels",
    "rule_figure",
    "rule_panels",
    "score_panels",
    "step_panels",
    "subblock_panels",
    "theorem_figure",
    "theorem_panels",
]


def panels_figure(panels: Sequence[Panel], *, title: str = "") -> Figure:
    """Return a figure of panels; one key for all where they share their labels, else one beside each.

    Example:
        >>> lines = [Line((0, 1), (1.0, 2.0), "p = 0"), Line((0, 1), (1.0, 1.5), "p = 1")]
        >>> figure = panels_figure([curves_panel("entropy", "layer", lines)])
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[1.0, 2.0], [1.0, 1.5]]
    """
    return draw(panels_chart(panels, title=title))


def panels_chart(panels: Sequence[Panel], *, title: str = "") -> Chart:
    """Return panels as a chart: curves with the same label have the same style in all of them."""
    if not panels or not all(panel.parts for panel in panels):
        raise OptionError("`panels` must hold curves to draw, but got none.")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.key))
    alike = all(list(panel.key) == labels for panel in panels)
    rows = max(len(panel.y.ticks) for panel in panels)
    names = max((len(text) for panel in panels for _, text in panel.y.ticks), default=0)
    return Chart(
        tuple(_styled(panel, labels) for panel in panels),
        columns=2 if len(panels) in (2, 4) or (rows and len(panels) > 1) else 0,
        size=(3.5 + 0.06 * names, 0.3 * rows + 0.8) if rows else (4.2, 2.8),
        title=title,
        # Amounts that differ from panel to panel have colors of their own in each.
        shared_key=alike or not any(panel.ordered for panel in panels),
    )


def curves_panel(title: str, x_label: str, lines: Sequence[Line], *, ordered: bool = False) -> Panel:
    """Return curves over an axis from 0; ``ordered`` where they are steps of one amount."""
    parts = tuple(replace(line, style=place) for place, line in enumerate(lines))
    end = math.ceil(max((x for line in lines for x in line.x), default=1))
    across = replace(layer_axis(end), label=x_label)
    return Panel(title, across, value_axis(parts), parts, f"{title} by {x_label}", ordered=ordered * len(parts))


def _styled(panel: Panel, labels: Sequence[str]) -> Panel:
    """Return a panel with styles that hold for all panels, and without a label where there is nothing to tell apart."""
    parts: list[Part] = []
    for part in panel.parts:
        if isinstance(part, Line) and not panel.ordered and part.label:
            part = replace(part, style=labels.index(part.label))
        if isinstance(part, Line | Dots) and len(labels) == 1:
            part = replace(part, label="")
        parts.append(part)
    return replace(panel, parts=tuple(parts))


# --- what each experiment draws ------------------------------------------------------------------------------------


def score_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return the mean score over tasks by depth, in points, a curve for each model (Figure 1).

    Only layers that were scored on every task of the model count.
    """
    scores = check_frame(frame).filter(pl.col("kind") == "score")
    if scores.is_empty():
        raise OptionError("`frame` must have rows of kind 'score' to draw scores by depth, but got none.")
    lines = []
    for (model, revision), part in scores.group_by("model", "revision", maintain_order=True):
        every = part["dataset"].n_unique()
        mean = part.group_by("layer", "depth").agg(pl.col("value").mean(), pl.len()).filter(pl.col("len") == every)
        mean = mean.sort("layer")
        label = f"{_model_label(scores, model, revision)} ({every} tasks)"
        lines.append(Line(tuple(100 * mean["depth"]), tuple(100 * mean["value"]), label))
    return [curves_panel("mean score, points", "depth, % of the layers", lines)]


def metric_depth_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return a panel for each metric, a curve for each model and set of texts (Figures 2, 10, 12 and 13)."""
    return list(metrics_chart(frame).panels)


def along_panels(frame: pl.DataFrame, *, depths: Sequence[float] = (0.25, 0.5, 0.75, 1.0)) -> list[Panel]:
    """Return prompt entropy along the text at some depths, a curve for each model, with its deviation (Figure 5).

    Positions that fewer than half of the texts reach are left out: which texts are long is not the model's doing.
    """
    panels: dict[float, list[Line]] = {depth: [] for depth in depths}
    shown: dict[float, set[int]] = {depth: set() for depth in depths}
    for (model, revision), part in frame.group_by("model", "revision", maintain_order=True):
        kept = part.filter(pl.col("texts") >= part["texts"].max() / 2)  # type: ignore[operator]
        layers = kept["layer"].unique().sort().to_list()
        for depth in depths:
            layer = min(layers, key=lambda one: (abs(one - depth * max(layers)), one))
            rows = kept.filter(pl.col("layer") == layer).sort("position")
            around = zip(rows["value"] - rows["deviation"], rows["value"] + rows["deviation"], strict=True)
            shown[depth].add(layer)
            label = _model_label(frame, model, revision)
            panels[depth].append(Line(tuple(rows["position"]), tuple(rows["value"]), label, band=tuple(around)))
    titles = {
        depth: f"layer{'s'[: len(layers) - 1]} {' and '.join(map(str, sorted(layers)))}, {100 * depth:g} % of the depth"
        for depth, layers in shown.items()
    }
    return [curves_panel(titles[depth], "tokens so far", many) for depth, many in panels.items()]


_CONDITIONS = {
    "repetition": "repetition: tokens become one token of the text",
    "resampling": "resampling: tokens become others of the text",
    "randomness": "randomness: tokens become any of the vocabulary",
    "length": "length: the first n tokens, nats",
}


def prompt_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return prompt entropy by layer, a panel for each condition and a curve for each amount (Figure 6)."""
    several = frame["model"].n_unique() > 1
    panels = []
    for (model, condition), part in frame.group_by("model", "condition", maintain_order=True):
        word = "{:g} tokens" if condition == "length" else "p = {:g}"
        lines = _lines(part.sort("amount", "layer"), "amount", "layer", word)
        title = _CONDITIONS.get(str(condition), str(condition)) + (f" ({model})" if several else "")
        panels.append(curves_panel(title, "layer", lines, ordered=True))
    return panels


def order_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return the entropy of power-law spectra, and the smaller half's share of it, by exponent (Figure 7)."""
    titles = {"matrix_entropy": "entropy / log n", "tail_share": "share of the smaller half of the eigenvalues"}
    return [
        curves_panel(
            titles[str(name)],
            "exponent β of the spectrum",
            _lines(part.sort("alpha", "beta"), "alpha", "beta", "α = {:g}"),
            ordered=True,
        )
        for (name,), part in frame.group_by("name", maintain_order=True)
    ]


def subblock_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return each token metric by layer, a curve for each point inside the blocks (Figure 15).

    ``residual_in`` is not drawn: it is ``residual_out`` of the layer before.
    """
    several = frame["model"].n_unique() > 1
    shown = frame.filter(pl.col("site") != "residual_in").with_columns(pl.col("site").str.replace_all("_", " "))
    return [
        curves_panel(
            f"{name} ({model})" if several else str(name), "layer", _lines(part.sort("layer"), "site", "layer")
        )
        for (model, name), part in shown.group_by("model", "name", maintain_order=True)
    ]


def step_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return each metric by layer, a curve for each step of the training (Figures 4 and 11)."""
    return list(curves_chart(histories(frame)).panels)


def rule_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return the mean score over tasks of the layers that each rule chooses, a panel for each model (Table 2).

    Args:
        frame: a row for each model, task (``dataset``) and rule (``name``).
    """
    rules = frame["name"].unique(maintain_order=True).to_list()
    panels = []
    for (model,), mine in frame.group_by("model", maintain_order=True):
        means = dict(mine.group_by("name").agg(100 * pl.col("value").mean()).iter_rows())
        held = [rule for rule in rules if rule in means]
        x, last = tuple(means[rule] for rule in held), means["last"]
        tips = tuple(f"{rule}: {means[rule]:.1f}" for rule in held)
        spans = tuple((min(last, value), max(last, value)) for value in x)
        points = Dots(x, tuple(rules.index(rule) for rule in held), tips=tips, spans=spans)
        across = Axis("mean score, points; the line is the last layer", *padded(x))
        panels.append(Panel(str(model), across, named_axis(rules), (points, Rule(last))))
    return panels


def theorem_panels(frame: pl.DataFrame, statements: Mapping[str, str]) -> list[Panel]:
    """Return left over right side of every draw of every statement, on a logarithmic axis; 1 is equality.

    Args:
        frame: of :func:`~midlayer_encoders.paper.theorems.check_theorems`.
        statements: what each says, in the order to draw.
    """
    sides = frame.pivot("name", index=["statement", "draw", "holds"], values="value")
    sides = sides.with_columns(ratio=pl.col("left") / pl.col("right"))
    # The axis is logarithmic: a side that is zero or below has no place on it, but counts in the words.
    placed = sides.filter(pl.col("ratio") > 0, pl.col("ratio").is_finite())
    low, high = min(placed["ratio"]), max(placed["ratio"])
    parts: list[Part] = [Rule(1)]
    for row, statement in enumerate(statements):
        rows = sides.filter(pl.col("statement") == statement)
        for style, holds in enumerate((True, False)):
            ratios = tuple(placed.filter(statement=statement, holds=holds)["ratio"])
            parts.append(Dots(ratios, (row,) * len(ratios), "tick", style=style))
        parts.append(Word(1.3 * high, row, f"holds in {rows['holds'].sum()} of {len(rows)}"))
    powers = range(math.ceil(math.log10(low / 1.3)), math.floor(math.log10(1.3 * high)) + 1)
    ticks = tuple((10.0**power, f"{10.0**power:g}") for power in powers)
    across = Axis("left side / right side of each draw", low / 1.3, 1.3 * high, ticks, log=True)
    names = named_axis([f"{name}:\n{text}" for name, text in statements.items()])
    return [Panel("left over right side of each statement", across, names, tuple(parts))]


def correlation_figure(frame: pl.DataFrame, *, statistics: Sequence[str] = ("spearman", "kendall", "dcor")) -> Figure:
    """Return the figure of :func:`correlation_panels`."""
    return panels_figure(correlation_panels(frame, statistics=statistics))


def rule_figure(frame: pl.DataFrame) -> Figure:
    """Return the figure of :func:`rule_panels`."""
    return panels_figure(rule_panels(frame))


def theorem_figure(frame: pl.DataFrame, statements: Mapping[str, str]) -> Figure:
    """Return the figure of :func:`theorem_panels`."""
    return panels_figure(theorem_panels(frame, statements))


def _lines(rows: pl.DataFrame, by: str, x: str, word: str = "{}") -> list[Line]:
    """Return a curve for each value of a column, which is its label in the form of ``word``."""
    groups = rows.group_by(by, maintain_order=True)
    return [Line(tuple(part[x]), tuple(part["value"]), word.format(key)) for (key,), part in groups]


def _model_label(frame: pl.DataFrame, model: object, revision: object) -> str:
    several = frame.filter(pl.col("model") == model)["revision"].n_unique() > 1
    return f"{model} {revision}" if several else str(model)
