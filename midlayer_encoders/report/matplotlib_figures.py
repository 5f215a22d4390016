"""A chart as a matplotlib figure, for files and loggers; nothing global is touched, the figure is returned."""

from __future__ import annotations

import math
import textwrap
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.files import write_file
from midlayer_encoders.report.axes import Axis
from midlayer_encoders.report.charts import (
    Bars,
    Cells,
    Chart,
    Dots,
    Front,
    Level,
    Line,
    Mark,
    Panel,
    Part,
    Rule,
    Scale,
    Word,
)
from midlayer_encoders.report.style import LIGHT, MISSING, SERIES, dashes_of, ordered_colors
from midlayer_encoders.report.ticks import layer_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

__all__ = ["draw", "write_figure"]

_BEST, _INK, _SOFT = LIGHT["best"], LIGHT["ink"], LIGHT["soft"]
_LEVELS = ((5, 3), (1, 2), (7, 2, 1, 2))  # dashes of a level, of a second one and of a third
_HEAD = 3.2  # inches that the wide panel at the top is high


def draw(chart: Chart) -> Figure:
    """Return the figure of a chart.

    Example:
        >>> from midlayer_encoders.report.axes import layer_axis
        >>> from midlayer_encoders.report.charts import value_axis
        >>> line = Line((0, 1), (1.0, 2.0))
        >>> figure = draw(Chart((Panel("a line", layer_axis(1), value_axis([line]), (line,)),)))
        >>> figure.axes[0].get_title(loc="left"), figure.axes[0].lines[0].get_ydata().tolist()
        ('a line', [1.0, 2.0])
    """
    figure, places = _grid(chart)
    for number, (axes, panel) in enumerate(zip(places, chart.panels, strict=True)):
        _draw_panel(axes, panel, words=chart.head and number == 0, width=14 * chart.size[0])
    _name_rows_once(chart, places)
    _draw_scales(figure, chart, places)
    _draw_keys(figure, chart, places)
    if chart.y_label:
        figure.supylabel(chart.y_label, fontsize=10, color=_SOFT)
    return figure


def write_figure(figure: Figure, path: Path, *, dpi: int = 150) -> Path:
    """Write a figure and return where it lies; the ending decides the format."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=dpi, format=path.suffix.removeprefix(".") or "png")
    write_file(path, drawn.getvalue())
    return path


def _grid(chart: Chart) -> tuple[Figure, list[Axes]]:
    """Return a figure and a place for each panel: the last row may be short, the head is as wide as the others."""
    from matplotlib.figure import Figure

    count = (len(chart.panels) - chart.head) // chart.stack
    columns = chart.across
    rows = math.ceil(count / columns)
    wide, high = chart.size
    width = max(columns * wide, 7.5 if chart.head else 5.0)
    heights = [_HEAD] * chart.head + [high * chart.stack] * rows
    lines = math.ceil(len(chart.key) / _key_columns(chart, width)) if chart.shared_key and chart.key else 0
    figure = Figure(figsize=(width, sum(heights) + 0.25 * lines + 0.3), layout="constrained")
    cells = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    places = [figure.add_subplot(cells[0, :])] if chart.head else []
    for number in range(count):
        cell = cells[chart.head + number // columns, number % columns]
        # A bar of colors beside several panels needs them in one grid.
        stack = cell.subgridspec(chart.stack, 1) if chart.stack > 1 else [cell]
        places += [figure.add_subplot(stack[level]) for level in range(chart.stack)]
    return figure, places


def _draw_panel(axes: Axes, panel: Panel, *, words: bool, width: float) -> None:
    # Short parts stay whole: a space that does not break is no white space to `textwrap`.
    parts = (part.replace(" ", "\N{NO-BREAK SPACE}") if len(part) < 32 else part for part in panel.caption)
    caption = textwrap.fill(" · ".join(parts), int(width))
    title = f"{panel.title}\n{caption}" if caption else panel.title
    axes.set_title(title, loc="left", fontsize=11 if words else 9 if caption else 10)
    if not panel.parts:
        axes.set_axis_off()
        return
    for part in panel.parts:
        _draw_part(axes, part, panel.ordered, words=words)
    if words and panel.gain:
        _draw_gain(axes, panel)
    _frame(axes, panel)


def _draw_part(axes: Axes, part: Part, ordered: int, *, words: bool) -> None:
    match part:
        case Line():
            _draw_line(axes, part, ordered)
        case Dots():
            _draw_dots(axes, part, ordered)
        case Front():
            label = part.label or None
            axes.step(part.x, part.y, where="post", color=_BEST, alpha=0.3, linewidth=4, label=label)
        case Mark():
            _draw_mark(axes, part, words=words)
        case Level():
            dashes = _LEVELS[part.style % len(_LEVELS)]
            axes.axhline(part.value, color=_INK, linewidth=0.9, linestyle=(0, dashes), label=part.label or None)
        case Rule():
            chosen = part.kind == "chosen"
            axes.axvline(part.x, color=_BEST if chosen else _SOFT, linewidth=1, linestyle=":" if chosen else "-")
        case Word():
            _write(axes, part.text, (part.x, part.y), (0, 0) if part.centered else (7, 0), bold=part.bold, va="center")
        case Bars():
            heights = [top - part.base for top in part.tops]
            axes.bar(part.x, heights, bottom=part.base, color="#a8c8e4", width=0.8)
            axes.set_axisbelow(True)
        case Cells():
            _draw_cells(axes, part)


def _color(style: int, ordered: int) -> str:
    return ordered_colors(ordered)[style] if ordered else SERIES[style % len(SERIES)]


def _draw_line(axes: Axes, line: Line, ordered: int) -> None:
    color, dashes = _color(line.style, ordered), "" if ordered else dashes_of(line.style)
    if line.band:
        low, high = zip(*line.band, strict=True)
        axes.fill_between(line.x, low, high, color=color, alpha=0.18, linewidth=0)
    axes.plot(
        line.x,
        [value if math.isfinite(value) else math.nan for value in line.y],
        color=color,
        linestyle=(0, tuple(float(part) for part in dashes.split())) if dashes else "-",
        linewidth=1.6,
        marker="o" if len(line.x) <= 99 else "",  # a dot for each of a thousand points is a thick line
        markersize=2.5,
        label=line.label or None,
    )


_SHAPES: dict[str, dict[str, Any]] = {
    "disc": {"marker": "o", "markersize": 7, "markeredgecolor": "white"},
    "ring": {"marker": "o", "markersize": 6, "markerfacecolor": "none"},
    "dot": {"marker": ".", "markersize": 3, "alpha": 0.35},
    "tick": {"marker": "|", "markersize": 11},
}


def _draw_dots(axes: Axes, points: Dots, ordered: int) -> None:
    color = _color(points.style, ordered)
    if points.spans:
        low, high = zip(*points.spans, strict=True)
        axes.hlines(points.y, low, high, color=color, linewidth=1.4)
    shape = _SHAPES[points.kind]
    axes.plot(points.x, points.y, linestyle="", color=color, label=points.label or None, zorder=3, **shape)


def _draw_mark(axes: Axes, mark: Mark, *, words: bool) -> None:
    size, best = 8 if words else 5, mark.kind == "best"
    fill, edge = (_BEST, _BEST) if best else ("white", _INK)
    axes.plot(
        mark.x, mark.y, "o" if best else "s", color=fill, markeredgecolor=edge, markersize=size if best else size - 1
    )
    if words and mark.text:
        _write(axes, mark.text, (mark.x, mark.y), (0, 9) if best else (14, -4), bold=best)


def _draw_gain(axes: Axes, panel: Panel) -> None:
    """Draw the way from the best mark across and down to the last, and its length in words."""
    places = {part.kind: part for part in panel.parts if isinstance(part, Mark)}
    if len(places) < 2:
        return
    best, last = places["best"], places["last"]
    _write(axes, panel.gain, (last.x, best.y), (14, -4), bold=True)
    right = last.x + 0.015 * panel.x.high
    axes.plot([best.x, right, right], [best.y, best.y, last.y], ":", color=_BEST, linewidth=1.2)


def _write(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int], *, bold: bool, va: str = "baseline"
) -> None:
    axes.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        ha="left" if offset[0] else "center",
        va=va,
        color=_BEST if bold else _INK,
        weight="bold" if bold else "normal",
        fontsize=8 if va == "center" else 9,
        annotation_clip=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1} if offset == (0, 0) else None,
    )


def _draw_cells(axes: Axes, cells: Cells) -> None:
    # Strong colors are dark, in gray too; cells without a value show the ground behind.
    axes.set_facecolor(MISSING)
    scale = cells.scale
    axes.imshow(
        cells.values, cmap="Blues_r" if scale.falling else "Blues", vmin=scale.low, vmax=scale.high, aspect="auto"
    )
    if cells.peaks:
        axes.scatter(
            cells.peaks, range(len(cells.peaks)), s=30, facecolors="none", edgecolors=SERIES[1], linewidths=1.5
        )
    if cells.apart:
        axes.axhline(0.5, color="white", linewidth=3)


def _frame(axes: Axes, panel: Panel) -> None:
    """Give a panel its axes: quiet, with ends and ticks as they are described."""
    cells, named = panel.cells is not None, panel.y.named
    axes.tick_params(labelsize=8, colors=_SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    if cells or named:
        axes.spines[["left", "bottom"] if cells else "left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    if not cells:
        axes.grid(axis="x" if named else "y", color=LIGHT["rule"], linewidth=0.6)
    if panel.x.log:
        axes.set_xscale("log")
        axes.minorticks_off()
    margin = 0 if cells or panel.x.log else 0.03 * (panel.x.high - panel.x.low)  # for the dots at the ends
    axes.set_xlim(panel.x.low - margin, panel.x.high + margin)
    axes.set_ylim(panel.y.low, panel.y.high)
    _set_ticks(axes, "x", panel.x)
    _set_ticks(axes, "y", panel.y)
    axes.set_xlabel(panel.x.label, fontsize=8, color=_SOFT)
    axes.set_ylabel(panel.y.label, fontsize=8, color=_SOFT)


def _set_ticks(axes: Axes, which: str, axis: Axis) -> None:
    put = axes.set_xticks if which == "x" else axes.set_yticks
    if axis.ticks:
        places, texts = zip(*axis.ticks, strict=True)
        put(places, texts)
    elif axis.whole:
        put(layer_ticks(int(axis.high), 7))


def _name_rows_once(chart: Chart, places: list[Axes]) -> None:
    """Take the names of rows from panels that have them to their left already."""
    for number in range(1, len(places)):
        left, panel = chart.panels[number - 1], chart.panels[number]
        if not chart.head and number % chart.across and panel.y.named and panel.y == left.y:
            places[number].tick_params(labelleft=False)


def _draw_scales(figure: Figure, chart: Chart, places: list[Axes]) -> None:
    """Draw a bar of colors for all maps where they share it, else one beside each."""
    maps = [(axes, panel.cells) for axes, panel in zip(places, chart.panels, strict=True) if panel.cells]
    shared = chart.scale is not None
    for axes, cells in maps[:1] if shared else maps:
        _draw_scale(figure, axes.images[0], [one for one, _ in maps] if shared else [axes], cells.scale)


def _draw_scale(figure: Figure, image: AxesImage, beside: list[Axes], scale: Scale) -> None:
    capped: dict[str, Any] = {"extend": "max", "extendfrac": 0.05} if scale.capped else {}
    bar = figure.colorbar(image, ax=beside, pad=0.02, aspect=20, **capped)
    bar.set_label(scale.label, fontsize=8, color=_SOFT)
    bar.ax.tick_params(labelsize=7, colors=_SOFT)
    bar.outline.set_visible(False)


def _key_columns(chart: Chart, width: float) -> int:
    longest = max(map(len, chart.key), default=0)
    return max(1, min(len(chart.key), int(width / (0.6 + 0.07 * longest))))


def _draw_keys(figure: Figure, chart: Chart, places: list[Axes]) -> None:
    """Draw one key above all panels, with the title of the whole, or one beside each, never over a curve."""
    if chart.title and not (chart.shared_key and chart.key):
        figure.suptitle(chart.title, fontsize=11, x=0.01, ha="left")
    if not chart.shared_key:
        for axes in (axes for axes, panel in zip(places, chart.panels, strict=True) if panel.key):
            axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif chart.key:
        found = [pair for axes in places for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
        handles = {label: handle for handle, label in reversed(found)}  # of each label the first
        figure.legend(
            [handles[label] for label in chart.key],
            list(chart.key),
            loc="outside upper left",
            ncols=_key_columns(chart, figure.get_figwidth()),
            frameon=False,
            fontsize=8,
            title=chart.title or None,
            title_fontsize=11,
            alignment="left",
        )
