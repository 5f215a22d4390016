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
from midlayer_encoders.report import drawing, style
from midlayer_encoders.report.inline_svg import figure_svg
from midlayer_encoders.report.labels import METRIC_MEANINGS, significant, with_import

if TYPE_CHECKING:
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


def page_html(
    title: str,
    verdicts: Sequence[str],
    sections: Mapping[str, Sequence[str]],
    *,
    subtitle: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Return a self-contained page.

    Args:
        title: of the page.
        verdicts: what the page says, a paragraph each.
        sections: sentences and blocks of HTML by heading; a section without any is left out.
        subtitle: a line below the title.
        notes: sentences below the verdicts.
    """
    parts = {heading: [part for part in content if part.strip()] for heading, content in sections.items()}
    return render("page.html", title=title, verdicts=verdicts, sections=parts, subtitle=subtitle, notes=notes)


def block(name: str, *args: Any) -> Markup:
    """Return a macro of ``macros.html`` as HTML, such as a table."""
    return getattr(_environment().get_template("macros.html").module, name)(*args)  # type: ignore[no-any-return]


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
    }
    environment.filters |= {"breakable": breakable, "sentence": _sentence, "with_import": with_import}
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


def figure_html(figure: Figure, *, meanings: bool = False) -> Markup:
    """Return the HTML of a figure; with ``meanings``, what the values of its metrics mean."""
    titles = [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes] if meanings else []
    explained = {title: METRIC_MEANINGS[title] for title in titles if title in METRIC_MEANINGS}
    return block("figure", Markup(figure_svg(figure)), explained)


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
