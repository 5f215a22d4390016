"""Self-contained HTML pages from jinja2 templates."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from midlayer_encoders.files import write_file
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import METRIC_MEANINGS, with_import

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Texts of a column of a table, by layer or by the name of another row.
Texts: TypeAlias = dict[int | str, str]


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
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    environment.globals |= {"css": Markup(css), "figure": figure_html}
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
    titles = [axes.get_title(loc="left").replace("\n", ": ") for axes in figure.axes]
    explained = {title: METRIC_MEANINGS[title] for title in titles if meanings and title in METRIC_MEANINGS}
    image = b64encode(drawing.figure_bytes(figure, dpi=150)).decode()
    return block("figure", "; ".join(titles), image, round(90 * figure.get_figwidth()), explained)


def layer_table(caption: str, columns: Mapping[str, Texts], best: int | None = None, width: int = 8) -> Markup:
    """Return tables of texts by layer, below them rows with names, such as baselines.

    Args:
        caption: of each table.
        columns: texts of a column by layer or name, by heading; empty texts are unknown.
        best: layer to highlight.
        width: maximum number of columns of a table; more do not fit on paper.
    """
    count = math.ceil(len(columns) / width)
    tables = Markup("")
    for place in range(count):
        headings = list(columns)[place * len(columns) // count : (place + 1) * len(columns) // count]
        name = f"{caption}, {place + 1} of {count}" if count > 1 else caption
        tables += block("text_table", layer_rows({head: columns[head] for head in headings}), name, str(best))
    return tables


def layer_rows(columns: Mapping[str, Texts]) -> list[list[str]]:
    """Return the rows of a table of texts by layer, and below them by name; the headings come first."""
    keys: dict[int | str, None] = dict.fromkeys(key for texts in columns.values() for key in texts)
    rows: list[int | str] = [
        *sorted(key for key in keys if isinstance(key, int)),
        *(key for key in keys if isinstance(key, str)),
    ]
    return [["Layer", *columns], *([str(key), *(texts.get(key) or "–" for texts in columns.values())] for key in rows)]
