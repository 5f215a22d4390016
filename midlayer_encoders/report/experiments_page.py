"""The page of the paper's experiments: a section for each, with its claim, what came out, its curves and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from midlayer_encoders.report.charts import Panel
from midlayer_encoders.report.experiments import panels_chart
from midlayer_encoders.report.page import document, facts, large, section, sentences, soft
from midlayer_encoders.report.page_figures import figure_html
from midlayer_encoders.report.tables import plain_table

__all__ = ["Finding", "experiments_html"]


@dataclass(frozen=True)
class Finding:
    """What one experiment gave.

    Attributes:
        name: such as ``fig6``.
        title: in words.
        claim: the paper's.
        words: what came out.
        panels: what to draw.
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
    count = large(f"{len(findings)} experiment{'' if len(findings) == 1 else 's'} of the paper.")
    lead = f'{count}{sentences(notes)}<ul class="contents">{links}</ul>'
    sections = [f'<div id="{escape(one.name)}">{_section(one)}</div>' for one in findings]
    ordered = [panel.ordered for one in findings for panel in one.panels]
    return document(title, lead, [*sections, section("How it was measured", facts(how))], ordered=ordered)


def _section(one: Finding) -> str:
    drawn = figure_html(panels_chart(one.panels)) if one.panels else ""
    body = soft(f"The paper: {one.claim}") + sentences(one.words) + drawn + plain_table(one.table, label=one.title)
    return section(f"{one.name}: {one.title}", body)
