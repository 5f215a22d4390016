"""Draw charts with matplotlib; global state stays untouched and figures are returned, not shown."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.files import write_file
from midlayer_encoders.report import charts
from midlayer_encoders.report.style import LEVEL_DASHES, LIGHT, SERIES, color_of, dashes_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEAD_HEIGHT = 3.2  # inches
_MAX_MARKERS = 99  # points of a curve; the markers of a longer one would overlap


def draw(chart: charts.Chart) -> Figure:
    """Return the figure of a chart.

    Example:
        >>> from midlayer_encoders.report import charts
        >>> line = charts.Line((0, 1), (1.0, 2.0))
        >>> panel = charts.Panel("a line", charts.layer_axis(1), charts.value_axis([line]), (line,))
        >>> figure = draw(charts.Chart((panel,)))
        >>> figure.axes[0].get_title(loc="left"), figure.axes[0].lines[0].get_ydata().tolist()
        ('a line', [1.0, 2.0])
    """
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        figure, grid = _grid(chart)
        for number, (axes, panel) in enumerate(zip(grid, chart.panels, strict=True)):
            words = chart.head and number == 0
            _draw_title(axes, panel, words=words, width=int(14 * chart.size[0]))
            draw_panel(axes, panel, words=words)
            axes.set_xlabel(panel.x.label, fontsize=8, color=LIGHT["soft"])
            axes.set_ylabel(panel.y.label, fontsize=8, color=LIGHT["soft"])
        _name_rows_once(chart, grid)
        _draw_scales(figure, chart, grid)
        _draw_legends(figure, chart, grid)
        if chart.y_label:
            figure.supylabel(chart.y_label, fontsize=10, color=LIGHT["soft"])
    return figure


def write_figure(figure: Figure, path: Path, *, dpi: int = 150) -> Path:
    """Write a figure in the format that the file name's suffix selects, and return the path."""
    content = BytesIO()
    figure.savefig(content, dpi=dpi, format=path.suffix.removeprefix(".") or "png")
    write_file(path, content.getvalue())
    return path


def draw_panel(axes: Axes, panel: charts.Panel, *, words: bool, font_size: float = 8) -> None:
    """Draw the parts and the axes of a panel, without its title.

    Args:
        axes: to draw on.
        panel: to draw. The artists of part ``k`` have the gid ``part-k``.
        words: whether marks show their texts.
        font_size: of the tick labels.
    """
    if not panel.parts:
        axes.set_axis_off()
        return
    for index, part in enumerate(panel.parts):
        for artist in _draw_part(axes, part, panel.ordered, words=words):
            artist.set_gid(f"part-{index}")
    if words and panel.gain:
        _draw_gain(axes, panel)
    _draw_axes(axes, panel, font_size)


def _grid(chart: charts.Chart) -> tuple[Figure, list[Axes]]:
    """Return a figure and the axes of each panel; a head spans all columns."""
    from matplotlib.figure import Figure

    count = (len(chart.panels) - chart.head) // chart.stack
    columns = chart.columns_used
    panel_width, panel_height = chart.size
    width = max(columns * panel_width, 7.5 if chart.head else 5.0)
    heights = [_HEAD_HEIGHT] * chart.head + [panel_height * chart.stack] * math.ceil(count / columns)
    legend_rows = math.ceil(len(chart.key) / _legend_columns(chart, width)) if chart.shared_key and chart.key else 0
    figure = Figure(figsize=(width, sum(heights) + 0.25 * legend_rows + 0.3), layout="constrained")
    cells = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    grid = [figure.add_subplot(cells[0, :])] if chart.head else []
    for number in range(count):
        cell = cells[chart.head + number // columns, number % columns]
        # A color bar beside several panels needs them in one grid.
        stack = cell.subgridspec(chart.stack, 1) if chart.stack > 1 else [cell]
        grid += [figure.add_subplot(stack[level]) for level in range(chart.stack)]
    return figure, grid


def _draw_title(axes: Axes, panel: charts.Panel, *, words: bool, width: int) -> None:
    # `textwrap` does not break at no-break spaces.
    parts = (part.replace(" ", "\N{NO-BREAK SPACE}") if len(part) < 32 else part for part in panel.caption)
    caption = textwrap.fill(" · ".join(parts), width)
    title = f"{panel.title}\n{caption}" if caption else panel.title
    axes.set_title(title, loc="left", fontsize=11 if words else 9 if caption else 10)


def _draw_part(axes: Axes, part: charts.Part, ordered: int, *, words: bool) -> Sequence[Artist]:
    match part:
        case charts.Line():
            return _draw_line(axes, part, ordered)
        case charts.Dots():
            return _draw_dots(axes, part, ordered)
        case charts.Mark():
            return _draw_mark(axes, part, words=words)
        case charts.Level():
            dashes = LEVEL_DASHES[part.style % len(LEVEL_DASHES)]
            style = (0, tuple(map(float, dashes.split())))
            return [axes.axhline(part.value, color=LIGHT["ink"], linewidth=1.2, linestyle=style, label=part.label)]
        case charts.Rule():
            chosen = part.kind == "chosen"
            color = LIGHT["best" if chosen else "soft"]
            return [axes.axvline(part.x, color=color, linewidth=1.2, linestyle=(0, (2, 3)) if chosen else "-")]
        case charts.Word():
            offset = (0, 0) if part.centered else (7, 0)
            return [_write(axes, part.text, (part.x, part.y), offset, bold=part.bold, va="center")]
        case charts.Bars():
            heights = [top - part.base for top in part.tops]
            axes.set_axisbelow(True)
            return list(axes.bar(part.x, heights, bottom=part.base, color=LIGHT["bar"], width=0.8))
        case charts.Cells():
            return _draw_cells(axes, part)


def _draw_line(axes: Axes, line: charts.Line, ordered: int) -> Sequence[Artist]:
    if line.front:
        color = LIGHT["best"]
        return axes.step(line.x, line.y, where="post", color=color, alpha=0.3, linewidth=4, label=line.label)
    color = color_of(line.style, ordered)
    dashes = "" if ordered else dashes_of(line.style)
    artists: list[Artist] = []
    if line.band:
        low, high = zip(*line.band, strict=True)
        artists.append(axes.fill_between(line.x, low, high, color=color, alpha=0.18, linewidth=0))
    artists += axes.plot(
        line.x,
        [value if math.isfinite(value) else math.nan for value in line.y],
        color=color,
        linestyle=(0, tuple(map(float, dashes.split()))) if dashes else "-",
        linewidth=1.6,
        marker="o" if len(line.x) <= _MAX_MARKERS else "",
        markersize=2.5,
        label=line.label,
    )
    return artists


_MARKERS: dict[str, dict[str, Any]] = {
    "disc": {"marker": "o", "markersize": 7, "markeredgecolor": LIGHT["page"]},
    "ring": {"marker": "o", "markersize": 6, "markerfacecolor": "none"},
    "dot": {"marker": "o", "markersize": 2, "alpha": 0.35},
    "tick": {"marker": "|", "markersize": 11},
}


def _draw_dots(axes: Axes, dots: charts.Dots, ordered: int) -> Sequence[Artist]:
    color = color_of(dots.style, ordered)
    artists: list[Artist] = []
    if dots.spans:
        low, high = zip(*dots.spans, strict=True)
        artists.append(axes.hlines(dots.y, low, high, color=color, linewidth=1.4))
    marker = _MARKERS[dots.kind]
    artists += axes.plot(dots.x, dots.y, linestyle="", color=color, label=dots.label, zorder=3, **marker)
    return artists


def _draw_mark(axes: Axes, mark: charts.Mark, *, words: bool) -> Sequence[Artist]:
    best = mark.kind == "best"
    size = (8 if words else 5) - (not best)
    fill, edge = (LIGHT["best"], LIGHT["best"]) if best else (LIGHT["page"], LIGHT["ink"])
    artists: list[Artist] = []
    artists += axes.plot(mark.x, mark.y, "o" if best else "s", color=fill, markeredgecolor=edge, markersize=size)
    if words and mark.text:
        artists.append(_write(axes, mark.text, (mark.x, mark.y), (0, 9) if best else (14, -4), bold=best))
    return artists


def _draw_gain(axes: Axes, panel: charts.Panel) -> None:
    """Draw a dotted line from the best mark to the last one, and the difference as text."""
    marks = {part.kind: part for part in panel.parts if isinstance(part, charts.Mark)}
    if len(marks) < 2:
        return
    best, last = marks["best"], marks["last"]
    _write(axes, panel.gain, (last.x, best.y), (14, -4), bold=True)
    right = last.x + 0.015 * panel.x.high
    axes.plot([best.x, right, right], [best.y, best.y, last.y], ":", color=LIGHT["best"], linewidth=1.2)


def _write(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int], *, bold: bool, va: str = "baseline"
) -> Artist:
    return axes.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        ha="left" if offset[0] else "center",
        va=va,
        color=LIGHT["best" if bold else "ink"],
        weight="bold" if bold else "normal",
        fontsize=8 if va == "center" else 9,
        annotation_clip=False,
        bbox={"facecolor": LIGHT["page"], "edgecolor": "none", "pad": 1} if offset == (0, 0) else None,
    )


def _draw_cells(axes: Axes, cells: charts.Cells) -> Sequence[Artist]:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    # Opacity rather than lightness carries the value, so that the map works on light and dark pages.
    color = to_rgb(LIGHT["heat"])
    ends = [(*color, 0.06), (*color, 1.0)]
    colors = LinearSegmentedColormap.from_list("heat", ends[::-1] if cells.scale.falling else ends, N=64)
    rows, columns = len(cells.values), len(cells.values[0])
    mesh = axes.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(cells.values),
        cmap=colors.with_extremes(bad=LIGHT["missing"]),
        vmin=cells.scale.low,
        vmax=cells.scale.high,
    )
    for row, column in enumerate(cells.peaks):
        axes.plot(column, row, "o", markersize=5, markerfacecolor="none", markeredgecolor=SERIES[1])
    if cells.apart:
        axes.axhline(0.5, color=LIGHT["page"], linewidth=3)
    return [mesh]


def _draw_axes(axes: Axes, panel: charts.Panel, font_size: float) -> None:
    is_map = panel.cells is not None
    axes.tick_params(labelsize=font_size, colors=LIGHT["soft"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT["soft"])
    if is_map or panel.y.named:
        axes.spines[["left", "bottom"] if is_map else "left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    if not is_map:
        axes.grid(axis="x" if panel.y.named else "y", color=LIGHT["rule"], linewidth=0.6)
    if panel.x.log:
        axes.set_xscale("log")
        axes.minorticks_off()
    margin = 0 if is_map or panel.x.log else 0.03 * (panel.x.high - panel.x.low)  # for the dots at the ends
    axes.set_xlim(panel.x.low - margin, panel.x.high + margin)
    axes.set_ylim(panel.y.low, panel.y.high)
    _set_ticks(axes, "x", panel.x)
    _set_ticks(axes, "y", panel.y)


def _set_ticks(axes: Axes, which: str, axis: charts.Axis) -> None:
    set_ticks = axes.set_xticks if which == "x" else axes.set_yticks
    if axis.ticks:
        places, texts = zip(*axis.ticks, strict=True)
        set_ticks(places, texts)
    elif axis.whole:
        set_ticks(charts.layer_ticks(int(axis.high), 7))


def _name_rows_once(chart: charts.Chart, grid: list[Axes]) -> None:
    """Hide the row names of panels whose left neighbor has the same ones."""
    for number in range(1, len(grid)):
        left, panel = chart.panels[number - 1], chart.panels[number]
        if not chart.head and number % chart.columns_used and panel.y.named and panel.y == left.y:
            grid[number].tick_params(labelleft=False)


def _draw_scales(figure: Figure, chart: charts.Chart, grid: list[Axes]) -> None:
    """Draw one color bar for all heat maps if they share a scale, else one for each."""
    maps = [(axes, panel.cells.scale) for axes, panel in zip(grid, chart.panels, strict=True) if panel.cells]
    shared = chart.scale is not None
    for axes, scale in maps[:1] if shared else maps:
        _draw_scale(figure, axes, [axes for axes, _ in maps] if shared else [axes], scale)


def _draw_scale(figure: Figure, axes: Axes, beside: list[Axes], scale: charts.Scale) -> None:
    capped: dict[str, Any] = {"extend": "max", "extendfrac": 0.05} if scale.capped else {}
    bar = figure.colorbar(axes.collections[0], ax=beside, pad=0.02, aspect=20, **capped)
    bar.set_label(scale.label, fontsize=8, color=LIGHT["soft"])
    bar.ax.tick_params(labelsize=7, colors=LIGHT["soft"])
    bar.outline.set_visible(False)


def _legend_columns(chart: charts.Chart, width: float) -> int:
    longest = max(map(len, chart.key), default=0)
    return max(1, min(len(chart.key), int(width / (0.6 + 0.07 * longest))))


def _draw_legends(figure: Figure, chart: charts.Chart, grid: list[Axes]) -> None:
    """Draw the title and one legend above all panels, or a legend beside each panel."""
    if chart.title and not (chart.shared_key and chart.key):
        figure.suptitle(chart.title, fontsize=11, x=0.01, ha="left")
    if not chart.shared_key:
        for axes in (axes for axes, panel in zip(grid, chart.panels, strict=True) if panel.key):
            axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif chart.key:
        pairs = [pair for axes in grid for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
        handles = {label: handle for handle, label in reversed(pairs)}  # the first of each label
        figure.legend(
            [handles[label] for label in chart.key],
            list(chart.key),
            loc="outside upper left",
            ncols=_legend_columns(chart, figure.get_figwidth()),
            frameon=False,
            fontsize=8,
            title=chart.title or None,
            title_fontsize=11,
            alignment="left",
        )
