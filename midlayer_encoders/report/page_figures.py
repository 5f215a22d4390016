"""A chart as HTML: its panels with their captions, the key to its lines, the scale of its colors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from midlayer_encoders.report.charts import Chart, Dots, Front, Keyed, Level, Line, Panel
from midlayer_encoders.report.svg import (
    ALONE,
    MAP,
    PAIR,
    PANEL,
    PHONE,
    SMALL,
    WIDE,
    Size,
    level_class,
    panel_svg,
    rows_size,
)
from midlayer_encoders.report.svg_cells import scale_svg, strip_svg

__all__ = ["breakable", "figure_html", "strips_html", "wide_html"]


def breakable(name: str) -> str:
    """Return a name escaped, with places where a narrow column may break it.

    Example:
        >>> breakable("TwitterURLCorpus"), breakable("a_b")
        ('Twitter<wbr>URLCorpus', 'a_<wbr>b')
    """
    return "<wbr>".join(escape(part) for part in re.split(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[_/-])", name) if part)


def wide_html(panel: Panel, caption: str) -> str:
    """Return a panel with words at its marks, as wide as the page, and a narrow one for phones."""
    return f"<figure>{_by_width(panel, WIDE, PHONE)}<figcaption>{escape(caption)}</figcaption></figure>"


def figure_html(chart: Chart) -> str:
    """Return the panels of a chart side by side, under one key and one scale where they share them.

    The first stands above the others, as wide as all of them, where the chart has a head.
    """
    key = f"<div{_order(chart.panels[0])}>{_key(chart.key)}</div>" if chart.shared_key and chart.key else ""
    scale = scale_svg(chart.scale) if chart.scale else ""
    wide = chart.head or _alone(chart)
    head = _figure(chart.panels[:1], chart, ALONE) if wide else ""
    below = chart.panels[wide:]
    stacks = [below[start : start + chart.stack] for start in range(0, len(below), chart.stack)]
    if not stacks:
        return key + head
    pair = wide and len(stacks) < 3
    figures = [_figure(stack, chart, PAIR if pair else PANEL) for stack in stacks]
    # Three in a row where four would leave one alone in the last; rows with names take the room they need.
    named = any(panel.y.named for panel in chart.panels)
    columns = 2 if pair else 3 if len(figures) in (1, 2, 3, 5, 6, 9) else 4
    names = "panels rows" if named else "panels pair" if pair else "panels"
    parts = 2 * chart.stack + (not chart.shared_key)  # what a figure holds: captions, pictures, a key
    grid = f'<div class="{names}" style="--columns:{columns};--parts:{parts}">{"".join(figures)}</div>'
    return f"{key}{scale}{head}{grid}"


def strips_html(panel: Panel) -> str:
    """Return a map with long names of rows: a strip for each, its name beside it, or above it on a phone."""
    cells, names = panel.cells, [text for _, text in panel.y.ticks]
    if cells is None:
        raise TypeError(f"`panel` must hold cells to be drawn as strips, but {panel.title!r} has none.")
    strips = [
        f'<div class="{"average" if cells.apart and row == 0 else "task"}">{escape(name)}</div>'
        + strip_svg(cells, row, label=label)
        for row, (name, label) in enumerate(zip(names, cells.labels or names, strict=True))
    ]
    columns = "".join(
        f'<span style="left:{100 * (column + 0.5) / len(cells.values[0]):.2f}%">{escape(text)}</span>'
        for column, text in panel.x.ticks
    )
    rows = f'{"".join(strips)}<div class="layers" aria-hidden="true">{columns}</div>'
    return f'<div class="heat">{rows}</div>{scale_svg(cells.scale)}'


def _figure(stack: Sequence[Panel], chart: Chart, size: Size) -> str:
    first, *below = stack
    drawn = _by_width(first, ALONE, SMALL) if size is ALONE else _picture(first, size)
    drawn += "".join(f"<figcaption>{escape(panel.title)}</figcaption>{_picture(panel, size)}" for panel in below)
    words = " ".join(_unbroken(word) for word in _words(first, chart))
    key = "" if chart.shared_key else _key(first.key)
    caption = f"<figcaption><h3>{breakable(first.title)}</h3>{words}</figcaption>"
    return f"<figure{_order(first)}>{caption}{drawn}{key}</figure>"


def _alone(chart: Chart) -> bool:
    """Return whether a chart is one panel of curves, which has the page's width to itself."""
    first = chart.panels[0]
    return len(chart.panels) == 1 and not first.y.named and first.cells is None


def _by_width(panel: Panel, wide: Size, narrow: Size) -> str:
    return f'<div class="wide">{panel_svg(panel, wide)}</div><div class="narrow">{panel_svg(panel, narrow)}</div>'


def _picture(panel: Panel, size: Size) -> str:
    if panel.y.named:  # the letters of names do not grow with the page, nor shrink until they cannot be read
        rows = rows_size(panel)
        least = f'<div style="min-width:{0.8 * rows.width:.0f}px">{panel_svg(panel, rows)}</div>'
        return f'<div class="sideways" style="max-width:{rows.width}px">{least}</div>'
    return panel_svg(panel, MAP if panel.cells else size)


def _words(panel: Panel, chart: Chart) -> list[str]:
    """Return the words of a caption, its own, what is to the right, and what colors mean."""
    parts = list(panel.caption)
    if panel.y.named:
        parts.append(panel.x.label)
    elif panel.cells is None and panel.x.label != "layer" and not panel.title.endswith(panel.x.label):
        parts.append(f"by {panel.x.label}")
    elif panel.cells is not None and chart.scale is None:
        parts.append("{} (faint) to {}".format(*panel.cells.scale.ends))
    parts = [part for part in parts if part]
    return [*(f"{part} ·" for part in parts[:-1]), *parts[-1:]]


def _unbroken(word: str) -> str:
    return f'<span class="whole">{escape(word)}</span>' if len(word) < 32 else escape(word)


def _order(panel: Panel) -> str:
    return f' class="ordered-{panel.ordered}"' if panel.ordered else ""


def _key(labelled: Mapping[str, Keyed]) -> str:
    items = "".join(
        f'<li data-switch="{escape(label)}"><svg viewBox="0 0 32 12" aria-hidden="true">{_sample(part)}</svg>'
        f"<bdi>{escape(label)}</bdi></li>"
        for label, part in labelled.items()
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def _sample(part: Keyed) -> str:
    match part:
        case Line():
            return f'<g class="line s{part.style}"><path d="M0 6H32"/></g>'
        case Dots():
            return f'<g class="dots s{part.style}"><circle class="{part.kind}" cx="16" cy="6" r="4"/></g>'
        case Front():
            return '<path class="front" d="M0 10H16V2H32"/>'
        case Level():
            return f'<path class="{level_class(part)}" d="M0 6H32"/>'
