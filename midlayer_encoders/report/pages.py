"""Self-contained HTML pages from jinja2 templates."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from midlayer_encoders.files import write_file
from midlayer_encoders.frame.pareto import amount
from midlayer_encoders.report import drawing, inline_svg, style
from midlayer_encoders.report.labels import (
    METRIC_MEANINGS,
    duration,
    number,
    signed,
    significant,
    with_import,
    with_interval,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_page(text: str, path: str | Path) -> Path:
    """Write a page, create its folder if needed, and return the path."""
    # File names can hold lone surrogates, which UTF-8 cannot encode.
    write_file(Path(path), text.encode("utf-8", "xmlcharrefreplace"))
    return Path(path)


def render(template: str | Path, **context: Any) -> str:
    """Return a template of this package, or that in a file, as text."""
    environment = _environment()
    if isinstance(template, Path):
        return environment.from_string(template.read_text(encoding="utf-8")).render(context)
    return environment.get_template(template).render(context)


def notebook_html(
    title: str, rows: Sequence[Sequence[str]] = (), figure: Figure | None = None, notes: Sequence[str] = ()
) -> str:
    """Return a title, notes, a table and a figure as HTML for the cell of a notebook.

    Args:
        title: also the alternative text of the figure.
        rows: of the table, the headings first.
        figure: drawn as PNG, because the colors of an inline SVG depend on the CSS of a page.
        notes: sentences below the title.
    """
    image = b64encode(drawing.figure_bytes(figure)).decode() if figure is not None else ""
    return render("notebook.html", title=title, notes=notes, rows=rows, image=image)


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
        "svg": lambda *args, **options: Markup(inline_svg.panel_svg(*args, **options)),
        "svgs": inline_svg,
    }
    environment.filters |= {
        "amount": amount,
        "breakable": breakable,
        "duration": duration,
        "number": number,
        "signed": signed,
        "sentence": _sentence,
        "with_import": with_import,
        "with_interval": with_interval,
    }
    return environment


def _sentence(text: object) -> Markup:
    """Return a sentence as HTML: what is between backticks as code, and no line break before a percent sign."""
    unbroken = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", escape(text))
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", unbroken))


def breakable(name: str) -> Markup:
    """Return a name as HTML with optional line breaks between its words.

    Example:
        >>> print(breakable("TwitterURLCorpus"), breakable("a_b"))
        Twitter<wbr>URLCorpus a_<wbr>b
    """
    return Markup("<wbr>".join(escape(part) for part in re.split(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[_/-])", name) if part))


def _panel(axes: Axes, figure: Figure, *, meanings: bool) -> dict[str, Any]:
    """Return an axes and the texts that a page shows as HTML."""
    title, *lines = axes.get_title(loc="left").split("\n")
    return {
        "axes": axes,
        "title": title,
        "caption": " ".join(lines).replace("\N{NO-BREAK SPACE}", " ").split(" · "),
        "meaning": METRIC_MEANINGS.get(title, "") if meanings else "",
        "y_label": axes.get_ylabel() or figure.get_supylabel(),
        "is_named": axes.yaxis_inverted(),
    }


def figure_html(figure: Figure, *, words: bool = False, head: bool = False, meanings: bool = False) -> Markup:
    """Return the HTML of a figure, which is changed.

    Args:
        figure: whose only panel is as wide as the page if it shows curves.
        words: whether the marks of a panel that is as wide as the page have texts.
        head: whether the first of several panels is as wide as the page.
        meanings: whether panels of metrics say what their values mean.
    """
    panels = [_panel(axes, figure, meanings=meanings) for axes in figure.axes if axes.axison]
    wide = head or (len(panels) == 1 and not panels[0]["is_named"])
    return Markup(render("figure.html", panels=panels, words=words, wide=wide))


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


def metric_column(heading: str, layers: Iterable[int], values: Iterable[float], note: str = "") -> Column:
    """Return a column of values by layer, with four significant digits."""
    texts = {layer: significant(value, zeros=True) for layer, value in zip(layers, values, strict=True)}
    return Column(heading, texts, note=note)
