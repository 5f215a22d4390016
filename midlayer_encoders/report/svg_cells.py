"""The cells of a map as SVG text: in a panel, in a strip as wide as the page, and in the key to the colors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from midlayer_encoders.report.charts import Cells, Scale

__all__ = ["cell_shape", "peaks_last", "scale_svg", "strip_svg", "tip_title"]


def strip_svg(cells: Cells, row: int, *, label: str) -> str:
    """Return one row of a map as a strip that is as wide as the page gives it."""
    shapes = [cell_shape(cells, row, column, (column, 0, 1, 1)) for column in range(len(cells.values[row]))]
    view = f'viewBox="0 0 {len(cells.values[row])} 1" preserveAspectRatio="none"'
    return f'<svg class="strip" {view} role="img" aria-label="{escape(label)}">{peaks_last(shapes)}</svg>'


def scale_svg(scale: Scale) -> str:
    """Return the key to a map: its colors between the words of their ends."""
    steps = [scale.low + (scale.high - scale.low) * step / 9 for step in range(10)]
    cells = "".join(
        f'<rect x="{k}" width="1.02" height="1" fill-opacity="{_opacity(scale, value)}"/>'
        for k, value in enumerate(steps)
    )
    key = f'<svg class="strip" viewBox="0 0 10 1" preserveAspectRatio="none" aria-hidden="true">{cells}</svg>'
    low, high = scale.ends
    return f'<div class="scale"><span>{escape(low)}</span>{key}<span>{escape(high)}</span></div>'


def _opacity(scale: Scale, value: float) -> float:
    return round(0.06 + 0.94 * scale.strength(value), 2)


def cell_shape(cells: Cells, row: int, column: int, place: tuple[float, float, float, float]) -> str:
    """Return one cell at ``x, y, width, height``; one without a finite value is a stroke from corner to corner."""
    (x, y, wide, tall), value = place, cells.values[row][column]
    tip = tip_title(cells.tips[row][column])
    if not math.isfinite(value):
        return f'<path class="gap" d="M{x:g} {y + tall:g}L{x + wide:g} {y:g}">{tip}</path>'
    peak = 'class="peak" ' if cells.peaks and cells.peaks[row] == column else ""
    shape = f'x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" fill-opacity="{_opacity(cells.scale, value)}"'
    return f"<rect {peak}{shape}>{tip}</rect>"


def peaks_last(cells: Sequence[str]) -> str:
    """Return cells with those that are outlined at the end, so that no neighbor covers an outline."""
    return "".join(sorted(cells, key=lambda cell: 'class="peak"' in cell))


def tip_title(text: str) -> str:
    """Return the element that shows a text when its parent is pointed at."""
    return f"<title>{escape(text)}</title>"
