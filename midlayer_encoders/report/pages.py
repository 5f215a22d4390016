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
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from midlayer_encoders.files import write_file
from midlayer_encoders.frame import Series
from midlayer_encoders.frame.pareto import amount
from midlayer_encoders.report import inline_svg, style
from midlayer_encoders.report.charts import Chart
from midlayer_encoders.report.labels import duration, number, signed, significant

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
    environment = Environment(
        loader=PackageLoader("midlayer_encoders", "report/templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    environment.globals |= {
        "css": Markup(style.page_css()),
        "script": Markup(script),
        "script_digest": b64encode(sha256(script.encode()).digest()).decode(),
        "figure": figure_html,
        "svg": lambda panel, size: Markup(inline_svg.panel_svg(panel, size)),
        "sizes": inline_svg,
        "style": style,
    }
    environment.filters |= {
        "amount": amount,
        "breakable": breakable,
        "duration": duration,
        "number": number,
        "signed": signed,
    }
    return environment


def breakable(name: str) -> Markup:
    """Return a name as HTML with optional line breaks between its words.

    Example:
        >>> print(breakable("TwitterURLCorpus"), breakable("a_b"))
        Twitter<wbr>URLCorpus a_<wbr>b
    """
    return Markup("<wbr>".join(escape(part) for part in re.split(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[_/-])", name) if part))


def figure_html(chart: Chart, *, caption: str = "", words: bool = False) -> Markup:
    """Return the HTML of a chart.

    Args:
        chart: whose head, or only panel of curves, is as wide as the page.
        caption: of that panel.
        words: whether the marks of that panel show their texts.
    """
    named = any(panel.y.named for panel in chart.panels)
    wide = chart.head or (len(chart.panels) == 1 and not named and chart.panels[0].cells is None)
    rest = chart.panels[wide:]
    stacks = [rest[start : start + chart.stack] for start in range(0, len(rest), chart.stack)]
    return Markup(
        render("figure.html", chart=chart, caption=caption, words=words, named=named, wide=wide, stacks=stacks)
    )


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
