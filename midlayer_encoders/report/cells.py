"""Small maps of cells as SVG text: the stronger the colour, the larger the value; it follows the page's themes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

__all__ = ["cell_map", "cell_scale"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM = 220, 150, 30, 12, 24


def cell_map(
    values: NDArray[np.float64],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    tip: Callable[[int, int], str],
    label: str,
    low: float,
    high: float,
) -> str:
    """Return an SVG of a matrix of values, the first row at the bottom; a cell without a finite value is crossed.

    Args:
        values: shape ``(R, C)``.
        rows: what stands beside each row; empty for nothing.
        columns: what stands below each column; empty for nothing.
        tip: the text of a cell, by row and column.
        label: what the picture shows, for those who cannot see it.
        low: where the colours begin.
        high: where the colours end.

    Example:
        >>> text = cell_map(np.eye(2), rows="01", columns="01", tip="{} {}".format, label="m", low=0, high=1)
        >>> text.count("<rect"), text.count('fill-opacity="1.0"')
        (4, 2)
    """
    tall, wide = (_HEIGHT - _BOTTOM) / len(rows), (_WIDTH - _LEFT - _RIGHT) / len(columns)
    cells = []
    for row, column in np.ndindex(values.shape):
        x, y = _LEFT + column * wide, (len(rows) - 1 - row) * tall
        title = f"<title>{escape(tip(row, column))}</title>"
        if math.isfinite(values[row, column]):
            shade = f'fill-opacity="{_strength(float(values[row, column]), low, high)}"'
            cells.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{tall:.2f}" {shade}>{title}</rect>')
        else:
            line = f"M{x:.2f} {y + tall:.2f}L{x + wide:.2f} {y:.2f}"
            cells.append(f'<path class="gap" d="{line}">{title}</path>')
    words = [_word(text, _LEFT - 5, (len(rows) - 0.5 - row) * tall + 4, "end") for row, text in enumerate(rows) if text]
    words += [
        _word(text, _LEFT + (column + 0.5) * wide, _HEIGHT - 8, "middle") for column, text in enumerate(columns) if text
    ]
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    body = f'<g class="strip" shape-rendering="crispEdges">{"".join(cells)}</g>{"".join(words)}'
    return f'<svg class="chart" {view} role="img" aria-label="{escape(label)}">{body}</svg>'


def cell_scale(low: str, high: str) -> str:
    """Return the key of a map: its colours between the words of their ends."""
    cells = "".join(f'<rect x="{k}" width="1.02" height="1" fill-opacity="{_strength(k, 0, 9)}"/>' for k in range(10))
    key = f'<svg class="strip" viewBox="0 0 10 1" preserveAspectRatio="none" aria-hidden="true">{cells}</svg>'
    return f'<div class="scale"><span>{escape(low)}</span>{key}<span>{escape(high)}</span></div>'


def _strength(value: float, low: float, high: float) -> float:
    share = (value - low) / (high - low) if high > low else 0.5
    return round(0.04 + 0.96 * min(max(share, 0.0), 1.0), 2)


def _word(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
