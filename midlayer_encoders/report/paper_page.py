"""The page and the charts of the paper's experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import check_frame, histories
from midlayer_encoders.report import charts
from midlayer_encoders.report.drawing import draw
from midlayer_encoders.report.layer_charts import metrics_chart, model_label
from midlayer_encoders.report.pages import render
from midlayer_encoders.report.training_page import curves_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Finding:
    """The result of one experiment.

    Attributes:
        name: such as ``fig6``.
        title: of its section.
        claim: of the paper.
        words: sentences about the result.
        panels: to draw.
        table: rows to print, headings first; empty for none.
    """

    name: str
    title: str
    claim: str
    words: tuple[str, ...]
    panels: tuple[charts.Panel, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()

    @property
    def chart(self) -> charts.Chart | None:
        """The panels as a chart."""
        return panels_chart(self.panels) if self.panels else None


def experiments_html(
    findings: Sequence[Finding], *, title: str, how: Mapping[str, str], notes: Sequence[str] = ()
) -> str:
    """Return a self-contained page of experiments.

    Args:
        findings: one for each experiment.
        title: of the page.
        how: facts about the measurement: models, texts, seeds, versions.
        notes: sentences below the heading, such as omitted experiments.

    Example:
        >>> finding = Finding("fig7", "Orders", "a claim", ("It holds.",))
        >>> text = experiments_html([finding], title="All", how={"seed": "0"})
        >>> "<h2>fig7: Orders</h2>" in text and "It holds." in text
        True
    """
    return render("paper.html", title=title, notes=notes, findings=findings, how=how)


def panels_figure(panels: Sequence[charts.Panel], *, title: str = "") -> Figure:
    """Return a figure of panels, with one legend if all have the same labels, else one for each.

    Example:
        >>> lines = [charts.Line((0, 1), (1.0, 2.0), "p = 0"), charts.Line((0, 1), (1.0, 1.5), "p = 1")]
        >>> figure = panels_figure([curves_panel("entropy", "layer", lines)])
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[1.0, 2.0], [1.0, 1.5]]
    """
    return draw(panels_chart(panels, title=title))


def panels_chart(panels: Sequence[charts.Panel], *, title: str = "") -> charts.Chart:
    """Return panels as a chart in which curves with the same label have the same style."""
    if not panels or not all(panel.parts for panel in panels):
        raise OptionError("`panels` must hold curves to draw, but got none.")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.key))
    alike = all(list(panel.key) == labels for panel in panels)
    rows = max(len(panel.y.ticks) for panel in panels)
    names = max((len(text) for panel in panels for _, text in panel.y.ticks), default=0)
    return charts.Chart(
        tuple(_styled(panel, labels) for panel in panels),
        columns=2 if len(panels) in (2, 4) or (rows and len(panels) > 1) else 0,
        size=(3.5 + 0.06 * names, 0.3 * rows + 0.8) if rows else (4.2, 2.8),
        title=title,
        # Ordered colors mean something else in each panel unless the labels agree.
        shared_key=alike or not any(panel.ordered for panel in panels),
    )


def curves_panel(title: str, x_label: str, lines: Sequence[charts.Line], *, ordered: bool = False) -> charts.Panel:
    """Return a panel of curves; ``ordered`` if they are steps of one quantity."""
    parts = tuple(replace(line, style=style) for style, line in enumerate(lines))
    end = math.ceil(max((x for line in lines for x in line.x), default=1))
    x = replace(charts.layer_axis(end), label=x_label)
    return charts.Panel(
        title, x, charts.value_axis(parts), parts, f"{title} by {x_label}", ordered=ordered * len(parts)
    )


def _styled(panel: charts.Panel, labels: Sequence[str]) -> charts.Panel:
    """Return a panel with the styles of the whole chart, without labels if there is only one."""
    parts: list[charts.Part] = []
    for part in panel.parts:
        if isinstance(part, charts.Line) and not panel.ordered and part.label:
            part = replace(part, style=labels.index(part.label))
        if isinstance(part, charts.Line | charts.Dots) and len(labels) == 1:
            part = replace(part, label="")
        parts.append(part)
    return replace(panel, parts=tuple(parts))


def score_panels(frame: pl.DataFrame) -> list[charts.Panel]:
    """Return the mean score over tasks by depth, in points, a curve for each model (Figure 1).

    Layers that were not scored on every task of the model are left out.
    """
    scores = check_frame(frame).filter(pl.col("kind") == "score")
    if scores.is_empty():
        raise OptionError("`frame` must have rows of kind 'score' to draw scores by depth, but got none.")
    lines = []
    for (model, revision), part in scores.group_by("model", "revision", maintain_order=True):
        num_tasks = part["dataset"].n_unique()
        mean = part.group_by("layer", "depth").agg(pl.col("value").mean(), pl.len()).filter(pl.col("len") == num_tasks)
        mean = mean.sort("layer")
        label = f"{model_label(scores, model, revision)} ({num_tasks} tasks)"
        lines.append(charts.Line(tuple(100 * mean["depth"]), tuple(100 * mean["value"]), label))
    return [curves_panel("mean score, points", "depth, % of the layers", lines)]


def metric_depth_panels(frame: pl.DataFrame) -> list[charts.Panel]:
    """Return a panel for each metric, a curve for each model and dataset (Figures 2, 10, 12 and 13)."""
    return list(metrics_chart(frame).panels)


def along_panels(frame: pl.DataFrame, *, depths: Sequence[float] = (0.25, 0.5, 0.75, 1.0)) -> list[charts.Panel]:
    """Return prompt entropy along the text at several depths, a curve with its deviation for each model (Figure 5).

    Positions that fewer than half of the texts reach are left out.
    """
    panels: dict[float, list[charts.Line]] = {depth: [] for depth in depths}
    drawn_layers: dict[float, set[int]] = {depth: set() for depth in depths}
    for (model, revision), part in frame.group_by("model", "revision", maintain_order=True):
        rows_by_layer = part.filter(pl.col("texts") >= part["texts"].max() / 2)  # type: ignore[operator]
        layers = rows_by_layer["layer"].unique().sort().to_list()
        for depth in depths:
            layer = min(layers, key=lambda layer: (abs(layer - depth * max(layers)), layer))
            rows = rows_by_layer.filter(pl.col("layer") == layer).sort("position")
            band = zip(rows["value"] - rows["deviation"], rows["value"] + rows["deviation"], strict=True)
            drawn_layers[depth].add(layer)
            label = model_label(frame, model, revision)
            panels[depth].append(charts.Line(tuple(rows["position"]), tuple(rows["value"]), label, band=tuple(band)))
    titles = {
        depth: f"layer{'s'[: len(layers) - 1]} {' and '.join(map(str, sorted(layers)))}, {100 * depth:g} % of the depth"
        for depth, layers in drawn_layers.items()
    }
    return [curves_panel(titles[depth], "tokens so far", lines) for depth, lines in panels.items()]


_CONDITIONS = {
    "repetition": "repetition: tokens become one token of the text",
    "resampling": "resampling: tokens become others of the text",
    "randomness": "randomness: tokens become any of the vocabulary",
    "length": "length: the first n tokens, nats",
}


def prompt_panels(frame: pl.DataFrame) -> list[charts.Panel]:
    """Return prompt entropy by layer, a panel for each condition and a curve for each amount (Figure 6)."""
    several = frame["model"].n_unique() > 1
    panels = []
    for (model, condition), part in frame.group_by("model", "condition", maintain_order=True):
        pattern = "{:g} tokens" if condition == "length" else "p = {:g}"
        lines = _lines(part.sort("amount", "layer"), "amount", "layer", pattern)
        title = _CONDITIONS.get(str(condition), str(condition)) + (f" ({model})" if several else "")
        panels.append(curves_panel(title, "layer", lines, ordered=True))
    return panels


def order_panels(frame: pl.DataFrame) -> list[charts.Panel]:
    """Return the entropy of power-law spectra, and the share of the smaller half, by exponent (Figure 7)."""
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


def subblock_panels(frame: pl.DataFrame) -> list[charts.Panel]:
    """Return each token metric by layer, a curve for each point inside the blocks (Figure 15).

    ``residual_in`` is left out because it equals ``residual_out`` of the previous layer.
    """
    several = frame["model"].n_unique() > 1
    sites = frame.filter(pl.col("site") != "residual_in").with_columns(pl.col("site").str.replace_all("_", " "))
    return [
        curves_panel(
            f"{name} ({model})" if several else str(name), "layer", _lines(part.sort("layer"), "site", "layer")
        )
        for (model, name), part in sites.group_by("model", "name", maintain_order=True)
    ]


def step_panels(frame: pl.DataFrame) -> list[charts.Panel]:
    """Return each metric by layer, a curve for each training step (Figures 4 and 11)."""
    return list(curves_chart(histories(frame)).panels)


def rule_panels(frame: pl.DataFrame) -> list[charts.Panel]:
    """Return the mean score over tasks of the layers that each rule selects, a panel for each model (Table 2).

    Args:
        frame: a row for each model, task (``dataset``) and rule (``name``).
    """
    rules = frame["name"].unique(maintain_order=True).to_list()
    panels = []
    for (model,), rows in frame.group_by("model", maintain_order=True):
        means = dict(rows.group_by("name").agg(100 * pl.col("value").mean()).iter_rows())
        scored = [rule for rule in rules if rule in means]
        x, last = tuple(means[rule] for rule in scored), means["last"]
        tips = tuple(f"{rule}: {means[rule]:.1f}" for rule in scored)
        spans = tuple((min(last, value), max(last, value)) for value in x)
        points = charts.Dots(x, tuple(rules.index(rule) for rule in scored), tips=tips, spans=spans)
        axis = charts.Axis("mean score, points; the line is the last layer", *charts.padded(x))
        panels.append(charts.Panel(str(model), axis, charts.named_axis(rules), (points, charts.Rule(last))))
    return panels


def theorem_panels(frame: pl.DataFrame, statements: Mapping[str, str]) -> list[charts.Panel]:
    """Return the ratio of both sides of each draw of each statement on a logarithmic axis.

    Args:
        frame: returned by :func:`~midlayer_encoders.paper.theorems.check_theorems`.
        statements: text of each, in drawing order.
    """
    sides = frame.pivot("name", index=["statement", "draw", "holds"], values="value")
    sides = sides.with_columns(ratio=pl.col("left") / pl.col("right"))
    # Ratios that are not positive have no place on the axis, but count in the text.
    drawable = sides.filter(pl.col("ratio") > 0, pl.col("ratio").is_finite())
    low, high = min(drawable["ratio"]), max(drawable["ratio"])
    parts: list[charts.Part] = [charts.Rule(1)]
    for row, statement in enumerate(statements):
        rows = sides.filter(pl.col("statement") == statement)
        for style, holds in enumerate((True, False)):
            ratios = tuple(drawable.filter(statement=statement, holds=holds)["ratio"])
            parts.append(charts.Dots(ratios, (row,) * len(ratios), "tick", style=style))
        parts.append(charts.Word(1.3 * high, row, f"holds in {rows['holds'].sum()} of {len(rows)}"))
    powers = range(math.ceil(math.log10(low / 1.3)), math.floor(math.log10(1.3 * high)) + 1)
    ticks = tuple((10.0**power, f"{10.0**power:g}") for power in powers)
    x = charts.Axis("left side / right side of each draw", low / 1.3, 1.3 * high, ticks, log=True)
    names = charts.named_axis([f"{name}:\n{text}" for name, text in statements.items()])
    return [charts.Panel("left over right side of each statement", x, names, tuple(parts))]


def _lines(rows: pl.DataFrame, by: str, x: str, pattern: str = "{}") -> list[charts.Line]:
    """Return a curve for each value of a column, labeled by ``pattern``."""
    groups = rows.group_by(by, maintain_order=True)
    return [charts.Line(tuple(part[x]), tuple(part["value"]), pattern.format(key)) for (key,), part in groups]
