"""The numbers behind the pictures, as tables that scroll in a box of their own and fit on paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from midlayer_encoders.frame import Curve, Series, Summary, average_baseline
from midlayer_encoders.report.page_figures import breakable
from midlayer_encoders.report.ticks import number, significant

__all__ = ["metric_tables", "plain_table", "score_tables"]

_WIDEST = 8  # columns of results in a table: what a page of paper holds
_WINNER, _TOP = ' class="winner"', ' class="top"'


@dataclass(frozen=True)
class _Column:
    """A heading, a text for each layer, the layer whose text stands out, and the foot."""

    heading: str
    texts: Mapping[int, str]
    top: int | None = None
    foot: str = ""


def score_tables(
    summary: Summary,
    *,
    parameters: Mapping[int, int],
    seconds: Mapping[int, float],
    baselines: Mapping[str, float],
    baseline_name: str,
) -> str:
    """Return tables of points: a row for each layer, the tasks in columns, the baseline at the foot."""
    layers = sorted(set().union(*(curve.points for curve in summary.tasks)))
    first = []
    if any(layer in parameters for layer in layers):
        first.append(_Column("Parameters, M", {layer: number(count / 1e6) for layer, count in parameters.items()}))
    if any(layer in seconds for layer in layers):
        first.append(_Column("Seconds", {layer: number(time, 2) for layer, time in seconds.items()}))
    if summary.average and len(summary.tasks) > 1:
        first.append(_score_column(summary.average, "Average", average_baseline(summary, baselines)))
    tasks = [
        _score_column(task, breakable(task.name), 100 * baselines[task.name] if task.name in baselines else None)
        for task in summary.tasks
    ]
    foot = baseline_name if baselines else ""
    winner = summary.average.best_layer if summary.average and len(layers) > 1 else None
    return _tables(layers, [*first, *tasks], caption="Points by layer", foot=foot, winner=winner)


def metric_tables(metrics: Mapping[str, Sequence[Series]], *, caption: str = "Metrics by layer") -> str:
    """Return tables of metrics: a row for each layer, four significant digits."""
    layers = sorted({layer for many in metrics.values() for series in many for layer in series.layers})
    columns = [
        _Column(
            breakable(name) + (f"<br><small>{breakable(series.label)}</small>" if series.label else ""),
            {layer: significant(value, zeros=True) for layer, value in zip(series.layers, series.values, strict=True)},
        )
        for name, many in metrics.items()
        for series in many
    ]
    return _tables(layers, columns, caption=caption, foot="", winner=None)


def plain_table(rows: Sequence[Sequence[str]], *, label: str) -> str:
    """Return a table of texts, the headings first; nothing where there is none."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows[1:]
    )
    return _scrolling(f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>", label=label)


def _scrolling(table: str, *, label: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>{table}</table></div>'


def _score_column(curve: Curve, heading: str, baseline: float | None) -> _Column:
    texts = {layer: number(value) for layer, value in curve.points.items()}
    return _Column(heading, texts, top=curve.best_layer if len(texts) > 1 else None, foot=number(baseline))


def _tables(layers: Sequence[int], columns: Sequence[_Column], *, caption: str, foot: str, winner: int | None) -> str:
    if not columns:
        return ""
    count = math.ceil(len(columns) / _WIDEST)
    size = math.ceil(len(columns) / count)
    parts = [columns[start : start + size] for start in range(0, len(columns), size)]
    return "".join(
        _table(layers, part, caption=caption + (f", {place} of {count}" if count > 1 else ""), foot=foot, winner=winner)
        for place, part in enumerate(parts, start=1)
    )


def _table(layers: Sequence[int], columns: Sequence[_Column], *, caption: str, foot: str, winner: int | None) -> str:
    heads = "".join(f'<th scope="col">{column.heading}</th>' for column in columns)
    rows = "".join(
        f'<tr{_WINNER if layer == winner else ""}><th scope="row">{layer}</th>'
        + "".join(_cell(column, layer) for column in columns)
        + "</tr>"
        for layer in layers
    )
    last = "".join(f"<td>{column.foot}</td>" for column in columns)
    held = foot and any(column.foot not in ("", number(None)) for column in columns)
    tail = f'<tfoot><tr><th scope="row">{escape(foot)}</th>{last}</tr></tfoot>' if held else ""
    head = f'<caption>{escape(caption)}</caption><thead><tr><th scope="col">Layer</th>{heads}</tr></thead>'
    return _scrolling(f"{head}<tbody>{rows}</tbody>{tail}", label=caption)


def _cell(column: _Column, layer: int) -> str:
    return f"<td{_TOP if layer == column.top else ''}>{column.texts.get(layer, '–')}</td>"
