"""Draw on matplotlib axes without changing global state; figures are returned, not shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from midlayer_encoders.files import write_file
from midlayer_encoders.report.labels import amount
from midlayer_encoders.report.style import DASHES, LEVEL_DASHES, LIGHT, SERIES, ordered_colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEAD_HEIGHT = 3.2  # inches
_MAX_MARKERS = 99  # points of a curve; the markers of longer curves would overlap
_LOG_RATIO = 5  # an axis of amounts is logarithmic if its largest value is this many times the smallest
_KINDS: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 1.6, "marker": "o", "markersize": 2.5},
    "disc": {"linestyle": "", "marker": "o", "markersize": 7, "markeredgecolor": LIGHT["page"], "zorder": 3},
    "dot": {"linestyle": "", "marker": "o", "markersize": 2, "alpha": 0.35, "zorder": 3},
}


def panel_grid(
    count: int, *, columns: int = 0, size: tuple[float, float] = (3.2, 2.2), head: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a new figure and its axes, row by row.

    Args:
        count: number of axes.
        columns: axes per row; 0 for automatic.
        size: width and height of one axes, in inches.
        head: whether the first axes spans a row.
    """
    from matplotlib.figure import Figure

    num_cells = count - head
    columns = columns or (2 if num_cells in (2, 4) else max(min(num_cells, 3), 1))  # more are illegible on a page
    heights = [_HEAD_HEIGHT] * head + [size[1]] * math.ceil(num_cells / columns)
    figure = Figure(figsize=(max(columns * size[0], 7.5 if head else 5.0), sum(heights) + 0.3), layout="constrained")
    # A notebook draws only figures of pyplot by itself.
    figure._repr_png_ = partial(figure_bytes, figure)  # type: ignore[attr-defined]
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    cells = [grid[0, :]] * head + [grid[head + index // columns, index % columns] for index in range(num_cells)]
    for cell in cells:
        axes = figure.add_subplot(cell)
        axes.tick_params(labelsize=8, colors=LIGHT["soft"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LIGHT["soft"])
        axes.grid(axis="y", color=LIGHT["rule"], linewidth=0.6)
        axes.set_axisbelow(True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set(fontsize=8, color=LIGHT["soft"])
    return figure, figure.axes


def set_title(axes: Axes, title: str, caption: str = "", *, large: bool = False) -> None:
    """Set a title with a caption below it."""
    axes.set_title("\n".join(filter(None, [title, caption])), loc="left", fontsize=11 if large else 9)


def finish(figure: Figure, *, y_label: str = "") -> Figure:
    """Add a legend above all axes, fit vertical axes without limits to their curves, and return the figure."""
    from matplotlib.text import Text

    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    if handles := {label: handle for handle, label in reversed(pairs)}:  # the first of each label
        labels = list(dict.fromkeys(label for _, label in pairs))
        columns = 1 if max(map(len, labels)) > 40 else 3
        figure.set_figheight(figure.get_figheight() + 0.25 * math.ceil(len(labels) / columns))
        layout: dict[str, Any] = {"loc": "outside upper left", "ncols": columns, "frameon": False, "fontsize": 8}
        figure.legend([handles[label] for label in labels], labels, **layout)
    if y_label:
        figure.supylabel(y_label, fontsize=10, color=LIGHT["soft"])
    for axes in figure.axes:
        if axes.get_autoscaley_on():
            value_axis(axes)
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    return figure


def write_figure(figure: Figure, path: Path, *, dpi: int = 150) -> Path:
    """Write a figure in the format that the file name's suffix selects, and return the path."""
    write_file(path, figure_bytes(figure, path.suffix.removeprefix(".") or "png", dpi=dpi))
    return path


def figure_bytes(figure: Figure, image_format: str = "png", *, dpi: int = 100) -> bytes:
    """Return the content of an image file."""
    content = BytesIO()
    figure.savefig(content, dpi=dpi, format=image_format)
    return content.getvalue()


@dataclass(frozen=True)
class Line:
    """A curve of :func:`plot_panels`: arguments of :func:`draw_points`."""

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    style: int = 0
    band: tuple[Sequence[float], Sequence[float]] | None = None


def plot_panels(
    panels: Mapping[str, Sequence[Line]],
    num_layers: int,
    *,
    relative: bool = False,
    ordered: int = 0,
    chosen: int | None = None,
    level: float | None = None,
) -> Figure:
    """Return a panel of curves over layers for each title.

    Args:
        panels: the curves by title.
        num_layers: the last layer.
        relative: whether positions are relative depths.
        ordered: number of styles if they are steps of one quantity; 0 if they are categories.
        chosen: a layer to mark.
        level: a value to mark.
    """
    figure, grid = panel_grid(len(panels))
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        if chosen is not None:
            draw_rule(axes, chosen, chosen=True)
        if level is not None:
            draw_level(axes, level)
        for line in lines:
            draw_points(axes, line.x, line.y, label=line.label, style=line.style, band=line.band, ordered=ordered)
        layer_axis(axes, num_layers, relative=relative)
        set_title(axes, title)
    return finish(figure)


def draw_points(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    kind: Literal["line", "disc", "dot"] = "line",
    *,
    label: str = "",
    style: int = 0,
    band: tuple[Sequence[float], Sequence[float]] | None = None,
    ordered: int = 0,
) -> None:
    """Draw a curve, with a gap where a value is not finite, or separate dots.

    Args:
        axes: axes to draw on.
        x: position of each point.
        y: value of each point.
        kind: ``line``, ``disc`` or ``dot`` (small and faint).
        label: label in the legend; empty for none.
        style: index of the color and dashes.
        band: lower and upper ends of the interval at each position, drawn as a shaded band.
        ordered: number of colors if styles are steps of one quantity; 0 if they are categories.
    """
    color = ordered_colors(ordered)[style] if ordered else SERIES[style % len(SERIES)]
    dashes = "-" if ordered else DASHES[style // len(SERIES) % len(DASHES)]  # colors change first
    options = {"linestyle": dashes, **_KINDS[kind]}
    if len(x) > _MAX_MARKERS:
        options["marker"] = ""
    if band is not None:
        axes.fill_between(x, *band, color=color, alpha=0.18, linewidth=0)
    finite_y = np.where(np.isfinite(np.asarray(y, dtype=float)), y, math.nan)
    axes.plot(x, finite_y, color=color, label=label, gid="line" if kind == "line" else "dots", **options)


def draw_mark(axes: Axes, x: float, y: float, text: str = "", *, best: bool = True) -> None:
    """Mark the best layer of a curve, or the last one, with a text above it."""
    color = LIGHT["best" if best else "ink"]
    axes.plot(x, y, "o" if best else "s", color=color, fillstyle="full" if best else "none", zorder=4, gid="mark")
    if text:
        align: Any = "left" if x == 0 else "center"  # centered at layer 0, it would cover the axis
        style: dict[str, Any] = {"color": color, "weight": "bold", "fontsize": 9, "textcoords": "offset points"}
        axes.annotate(text, (x, y), (0, 9), ha=align, **style)


def draw_level(axes: Axes, value: float, label: str = "", style: int = 0) -> None:
    """Draw a horizontal line, such as a baseline; ``style`` selects its dashes."""
    dashes = LEVEL_DASHES[style % len(LEVEL_DASHES)]
    axes.axhline(value, color=LIGHT["ink"], linewidth=1.2, linestyle=dashes, label=label, gid="level")


def draw_rule(axes: Axes, x: float, *, chosen: bool = False) -> None:
    """Draw a vertical line at a reference value, or at the chosen layer."""
    color = LIGHT["best" if chosen else "soft"]
    axes.axvline(x, color=color, linewidth=1.2, linestyle=(0, (2, 3)) if chosen else "-", gid="rule")


def layer_axis(axes: Axes, num_layers: int, label: str = "layer", *, room: float = 0.0, relative: bool = False) -> None:
    """Set up the horizontal axis for layers, or for relative depth to compare models of different depth.

    Args:
        axes: axes to change.
        num_layers: the last layer.
        label: label of the axis.
        room: space to add at both ends.
        relative: whether positions are relative depths.
    """
    from matplotlib.ticker import MaxNLocator

    last = 1 if relative else max(num_layers, 1)
    margin = room + 0.03 * (last + 2 * room)  # for the dots at the ends
    axes.set_xlim(-margin, last + margin)
    if relative:
        axes.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 3, 4, 5, 6, 8, 10]))
    axes.set_xlabel("relative depth" if relative else label)


def amount_axis(axes: Axes, label: str, amounts: Sequence[float]) -> None:
    """Set up the horizontal axis for positive amounts, logarithmic if they differ by a factor of five or more."""
    from matplotlib.ticker import LogLocator

    axes.set_xlabel(label)
    low, high = min(amounts), max(amounts)
    axes.set_xlim(pad_range(amounts, 0.11))
    if high >= _LOG_RATIO * low:
        axes.set(xscale="log", xlim=(low / 1.2, high * 1.2))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=9))
        axes.xaxis.set_major_formatter(lambda value, _: amount(value))
        axes.minorticks_off()


def value_axis(*panels: Axes, pad: float = 0.08) -> None:
    """Set a common vertical range that contains everything drawn on the axes, with a margin."""
    ends = [end for axes in panels for end in axes.dataLim.intervaly if math.isfinite(end)]
    for axes in panels:
        axes.set_ylim(pad_range(ends or [0.0], pad))


def pad_range(values: Sequence[float], pad: float = 0.08) -> tuple[float, float]:
    """Return a range that contains the values with a margin; its width is never 0.

    Example:
        >>> pad_range([10.0, 20.0], pad=0.1), pad_range([5.0])
        ((9.0, 21.0), (4.75, 5.25))
    """
    low, high = min(values), max(values)
    # Rounding noise of a constant must not become a curve.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.05 * abs(high) or 1.0
        return low - margin, high + margin
    return low - pad * (high - low), high + pad * (high - low)
