"""The page of a selection, and its cell in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import polars as pl

from midlayer_encoders.report.labels import significant
from midlayer_encoders.report.pages import block, figure_html, notebook_html, page_html
from midlayer_encoders.report.results import versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class SelectionLike(Protocol):
    """What a page shows of a :class:`~midlayer_encoders.Selection`."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def title(self) -> str:
        """The layer and the model."""

    @property
    def verdict(self) -> str:
        """The layer and the reason."""

    @property
    def notes(self) -> Sequence[str]:
        """Sentences below the verdict."""

    def plot(self) -> Figure:
        """Return the figure."""

    def choices_table(self) -> pl.DataFrame:
        """Return a row for each rule or recipe."""


def selection_html(selection: SelectionLike, lines: Mapping[str, str]) -> str:
    """Return the self-contained page of a selection, with the lines that create the encoder, by language."""
    columns, *rows = _rows(selection)
    choices = {}
    for name, *cells, reason in rows:
        values = [f"{column} {cell}" for column, cell in zip(columns[1:-1], cells, strict=True) if cell]
        choices[name] = ": ".join(filter(None, [", ".join(values), reason]))
    sections: dict[str, list[str]] = {
        "What each would choose": [figure_html(selection.plot()), block("facts", choices)],
        "Use this layer": [block("code", lines)],
        "How it was measured": [block("facts", {"Model": selection.model.removeprefix("local/"), **versions()})],
    }
    return page_html(selection.title, [selection.verdict], sections, notes=selection.notes)


def selection_cell(selection: SelectionLike) -> str:
    """Return the choice of each rule or recipe and the figure as HTML for the cell of a notebook."""
    return notebook_html(selection.verdict, _rows(selection), selection.plot(), selection.notes)


def _rows(selection: SelectionLike) -> list[list[str]]:
    """Return the table of choices as texts, the headings first."""
    table = selection.choices_table()
    return [table.columns, *([_cell_text(value) for value in row] for row in table.iter_rows())]


def _cell_text(value: object) -> str:
    return "" if value is None else significant(value, 3) if isinstance(value, float) else str(value)
