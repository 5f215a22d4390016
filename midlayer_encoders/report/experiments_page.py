"""The page of the paper's experiments: a section for each, with its claim, what came out, its curves and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from midlayer_encoders.report.experiments import Panel, shared_labels
from midlayer_encoders.report.page import document, facts, section, sentences
from midlayer_encoders.report.panels import panel_grid
from midlayer_encoders.report.steps import step_colours
from midlayer_encoders.report.svg import PANEL, Line, Size, chart
from midlayer_encoders.report.tables import breakable

__all__ = ["Finding", "experiments_html"]


_ALONE = Size(780, 300, 44, 20, 10, (11, 6), words=False)  # a panel that has the page's width to itself


@dataclass(frozen=True)
class Finding:
    """What one experiment gave.

    Attributes:
        name: such as ``fig6``.
        title: in words.
        claim: the paper's.
        words: what came out.
        panels: curves to draw.
        table: rows to print, the headings first; empty for none.
    """

    name: str
    title: str
    claim: str
    words: tuple[str, ...]
    panels: tuple[Panel, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


def experiments_html(
    findings: Sequence[Finding], *, title: str, how: Mapping[str, str], notes: Sequence[str] = ()
) -> str:
    """Return one self-contained page of experiments.

    Args:
        findings: one for each experiment that was run.
        title: heading of the page.
        how: what was measured and with what: models, texts, seeds, versions.
        notes: sentences below the heading, such as experiments that were left out, and why.

    Example:
        >>> found = Finding("fig7", "Orders", "a claim", ("It holds.",))
        >>> text = experiments_html([found], title="All", how={"seed": "0"})
        >>> "<h2>fig7: Orders</h2>" in text and "It holds." in text
        True
    """
    links = "".join(
        f'<li><a href="#{escape(one.name)}">{escape(one.name)}: {escape(one.title)}</a></li>' for one in findings
    )
    count = f"{len(findings)} experiment{'' if len(findings) == 1 else 's'} of the paper."
    header = (
        f'<header><h1>{escape(title)}</h1><p class="verdict">{count}</p>{sentences(notes)}'
        f'<ul class="contents">{links}</ul></header>'
    )
    body = "".join(f'<div id="{escape(one.name)}">{_section(one)}</div>' for one in findings)
    counts = sorted({len(panel.traces) for one in findings for panel in one.panels if panel.ordered})
    css = ".contents { columns: 18rem; padding-left: 1.2rem; }\na { color: var(--accent); }\n"
    css += "".join(_ordered_rules(count) for count in counts)
    return document(title, f"{header}<main>{body}{section('How it was measured', facts(how))}</main>", css=css)


def _section(one: Finding) -> str:
    claim = f'<p class="soft">The paper: {escape(one.claim)}</p>'
    return section(f"{one.name}: {one.title}", claim + sentences(one.words) + _panels(one.panels) + _table(one))


def _panels(panels: Sequence[Panel]) -> str:
    """Return the panels, under one key where they share their labels, else each with its own."""
    if not panels:
        return ""
    labels = shared_labels(panels)
    figures = []
    for panel in panels:
        mine = [trace.label for trace in panel.traces]
        drawn = _chart(panel, labels or mine, _ALONE if len(panels) == 1 else PANEL) + ("" if labels else _key(mine))
        title = f"<h3>{breakable(panel.title)}</h3>by {escape(panel.x_label)}"
        figures.append(f"<figure{_order(panel)}><figcaption>{title}</figcaption>{drawn}</figure>")
    key = f"<div{_order(panels[0])}>{_key(labels)}</div>" if len(labels) > 1 else ""
    return key + (panel_grid(figures) if len(panels) > 1 else figures[0])


def _order(panel: Panel) -> str:
    return f' class="ordered-{len(panel.traces)}"' if panel.ordered else ""


def _key(labels: Sequence[str]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 32 12" aria-hidden="true"><g class="line s{place}"><path d="M0 6H32"/></g></svg>'
        f"{escape(label)}</li>"
        for place, label in enumerate(labels)
    )
    return f'<ul class="legend">{items}</ul>'


def _chart(panel: Panel, labels: Sequence[str], size: Size) -> str:
    lines = [
        Line(
            list(zip(trace.x, trace.y, strict=True)),
            [f"{trace.label}, {x:g}: {y:.4g}" for x, y in zip(trace.x, trace.y, strict=True)],
            labels.index(trace.label),
            trace.band,
        )
        for trace in panel.traces
    ]
    end = max(1, -int(-panel.end // 1))
    return chart(lines, end, size=size, label=f"{panel.title} by {panel.x_label}")


def _table(one: Finding) -> str:
    if not one.table:
        return ""
    heads, *rows = one.table
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(one.title)}"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _ordered_rules(count: int) -> str:
    """Return the colours of so many curves in their order: those of the figures, and brighter ones on a dark ground."""
    from matplotlib.colors import to_hex

    light, dark = (
        "\n".join(f".ordered-{count} .s{k} {{ --c: {to_hex(colours(k))}; --dash: none; }}" for k in range(count))
        for colours in (step_colours(count), step_colours(count, dark=True))
    )
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
