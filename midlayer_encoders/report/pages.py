"""Self-contained HTML pages from jinja2 templates."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.files import write_file
from midlayer_encoders.frame import Series
from midlayer_encoders.frame.pareto import amount
from midlayer_encoders.report import inline_svg
from midlayer_encoders.report.charts import Chart, Dots, Keyed, Level, Panel
from midlayer_encoders.report.labels import number, signed, significant
from midlayer_encoders.report.style import LEVEL_DASHES, color_of, css_colors, dashes_of, page_css

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_MAX_COLUMNS = 8  # of a table on paper


def write_page(text: str, path: str | Path) -> Path:
    """Write a page, create its folder if needed, and return the path."""
    # File names can hold lone surrogates, which UTF-8 cannot encode.
    write_file(Path(path), text.encode("utf-8", "xmlcharrefreplace"))
    return Path(path)


def render(template: str, **context: Any) -> str:
    """Return a template of this package as text."""
    return _environment().get_template(template).render(context)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("midlayer_encoders", "report/templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    environment.globals |= {
        "css": Markup(page_css()),
        "script": Markup(script),
        "script_digest": b64encode(sha256(script.encode()).digest()).decode(),
        "figure": figure_html,
        "svg": lambda panel, size: Markup(inline_svg.panel_svg(panel, size)),
        "picture": _picture,
        "legend_sample": _legend_sample,
    }
    environment.filters |= {"amount": amount, "breakable": breakable, "number": number, "signed": signed}
    return environment


def breakable(name: str) -> Markup:
    """Return a name as HTML with optional line breaks between its words.

    Example:
        >>> print(breakable("TwitterURLCorpus"), breakable("a_b"))
        Twitter<wbr>URLCorpus a_<wbr>b
    """
    from markupsafe import Markup

    return Markup("<wbr>".join(escape(part) for part in re.split(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[_/-])", name) if part))


def figure_html(chart: Chart, *, caption: str = "", words: bool = False) -> Markup:
    """Return the HTML of a chart.

    Args:
        chart: whose head, or only panel of curves, is as wide as the page.
        caption: of that panel.
        words: whether the marks of that panel show their texts.
    """
    from markupsafe import Markup

    first = chart.panels[0]
    named = any(panel.y.named for panel in chart.panels)
    wide = chart.head or (len(chart.panels) == 1 and not named and first.cells is None)
    rest = chart.panels[wide:]
    stacks = [rest[start : start + chart.stack] for start in range(0, len(rest), chart.stack)]
    pair = wide and len(stacks) < 3
    text = render(
        "figure.html",
        chart=chart,
        caption=caption,
        head=first if wide else None,
        head_sizes=(inline_svg.WIDE, inline_svg.PHONE) if words else (inline_svg.ALONE, inline_svg.SMALL),
        stacks=stacks,
        size=inline_svg.PAIR if pair else inline_svg.PANEL,
        kind="rows" if named else "pair" if pair else "",
        # Three columns where four would leave a single panel in the last row.
        columns=2 if pair else 3 if len(stacks) in (1, 2, 3, 5, 6, 9) else 4,
        captions=[_caption(panel, chart) for panel in chart.panels],
    )
    return Markup(text)


def _picture(panel: Panel, size: inline_svg.Size) -> Markup:
    """Return the SVG of a panel; one with named rows scrolls rather than shrinks."""
    from markupsafe import Markup

    if not panel.y.named:
        return Markup(inline_svg.panel_svg(panel, inline_svg.MAP if panel.cells else size))
    rows = inline_svg.rows_size(panel)
    svg = inline_svg.panel_svg(panel, rows)
    scrolled = f'<div style="min-width:{0.8 * rows.width:.0f}px">{svg}</div>'
    return Markup(f'<div class="sideways" style="max-width:{rows.width}px">{scrolled}</div>')


def _caption(panel: Panel, chart: Chart) -> list[str]:
    """Return the short texts of a caption: the panel's, the horizontal axis, and the color scale."""
    parts = list(panel.caption)
    if panel.y.named:
        parts.append(panel.x.label)
    elif panel.cells is None and panel.x.label != "layer" and not panel.title.endswith(panel.x.label):
        parts.append(f"by {panel.x.label}")
    elif panel.cells is not None and chart.scale is None:
        parts.append("{} (faint) to {}".format(*panel.cells.scale.ends))
    return [part for part in parts if part]


def _legend_sample(part: Keyed, ordered: int) -> dict[str, Any]:
    """Return the shape and the style of a part in a legend."""
    if isinstance(part, Level):
        dashes = LEVEL_DASHES[part.style % len(LEVEL_DASHES)]
        return {"style": f"stroke: var(--ink); stroke-dasharray: {dashes}", "dot": False}
    if isinstance(part, Dots):
        return {"style": f"fill: {css_colors(ordered)[color_of(part.style, ordered)]}", "dot": True}
    if part.front:
        return {"style": "stroke: var(--best); stroke-width: 6; stroke-opacity: 0.3", "dot": False}
    color = css_colors(ordered)[color_of(part.style, ordered)]
    dashes = "" if ordered else dashes_of(part.style)
    return {"style": f"stroke: {color}; stroke-dasharray: {dashes or 'none'}", "dot": False}


@dataclass(frozen=True)
class Column:
    """A column of a table by layer.

    Attributes:
        heading: first line of its head.
        texts: cell of each layer.
        best: layer whose cell is highlighted.
        feet: cells below the layers.
        note: second line of its head.
    """

    heading: str
    texts: Mapping[int, str]
    best: int | None = None
    feet: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class LayerTable:
    """Columns by layer, with an optional highlighted layer and names of the rows at the foot."""

    caption: str
    columns: Sequence[Column]
    winner: int | None = None
    feet: Sequence[str] = ()

    @property
    def layers(self) -> list[int]:
        """All layers that have a cell."""
        return sorted({layer for column in self.columns for layer in column.texts})

    def pieces(self) -> Iterator[tuple[str, Sequence[Column]]]:
        """Yield the caption and the columns of tables that fit on paper."""
        count = math.ceil(len(self.columns) / _MAX_COLUMNS)
        size = math.ceil(len(self.columns) / max(count, 1))
        for place in range(count):
            suffix = f", {place + 1} of {count}" if count > 1 else ""
            yield self.caption + suffix, self.columns[place * size : (place + 1) * size]


def metric_table(metrics: Mapping[str, Sequence[Series]], *, caption: str = "Metrics by layer") -> LayerTable:
    """Return a table of metrics by layer, with four significant digits."""
    columns = [
        Column(
            name,
            {layer: significant(value, zeros=True) for layer, value in zip(series.layers, series.values, strict=True)},
            note=series.label,
        )
        for name, many in metrics.items()
        for series in many
    ]
    return LayerTable(caption, columns)
