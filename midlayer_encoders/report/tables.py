"""The numbers behind the pictures, as tables that scroll in a box of their own and fit on paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from midlayer_encoders.frame import Baselines, Curve, Series, Summary, average_baseline
from midlayer_encoders.report.page_figures import breakable
from midlayer_encoders.report.ticks import amount, number, significant

__all__ = ["metric_tables", "plain_table", "score_tables"]

_WIDEST = 8  # columns of results in a table: what a page of paper holds
_WINNER, _TOP = ' class="winner"', ' class="top"'


@dataclass(frozen=True)
class _Column:
    """A heading, a text for each layer, the layer whose text stands out, and the texts at the foot."""

    heading: str
    texts: Mapping[int, str]
    top: int | None = None
    feet: Sequence[str] = ()


def score_tables(
    summary: Summary,
    *,
    parameters: Mapping[int, int],
    seconds: Mapping[int, float],
    baselines: Baselines,
) -> str:
    """Return tables of points: a row for each layer, the tasks in columns, the baselines at the foot."""
    layers = sorted(set().union(*(curve.points for curve in summary.tasks)))
    first = []
    if any(layer in parameters for layer in layers):
        first.append(_Column("Parameters, M", {layer: number(count / 1e6) for layer, count in parameters.items()}))
    if any(layer in seconds for layer in layers):
        first.append(_Column("Milliseconds", {layer: amount(1e3 * time) for layer, time in seconds.items()}))
    if summary.average and len(summary.tasks) > 1:
        means = [average_baseline(summary, scores) for scores in baselines.values()]
        first.append(_score_column(summary.average, "Average", means))
    tasks = [
        _score_column(
            task,
            breakable(task.name),
            [100 * scores[task.name] if task.name in scores else None for scores in baselines.values()],
        )
        for task in summary.tasks
    ]
    winner = summary.average.best_layer if summary.average and len(layers) > 1 else None
    return _tables(layers, [*first, *tasks], caption="Points by layer", feet=list(baselines), winner=winner)


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
    return _tables(layers, columns, caption=caption, feet=[], winner=None)


def plain_table(rows: Sequence[Sequence[str]], *, label: str) -> str:
    """Return a table of texts, the headings first; nothing where there is none."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{breakable(word)}</th>' for word in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows[1:]
    )
    return _scrolling(f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>", label=label)


def _scrolling(table: str, *, label: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>{table}</table></div>'


def _score_column(curve: Curve, heading: str, baselines: Sequence[float | None]) -> _Column:
    texts = {layer: number(value) for layer, value in curve.points.items()}
    return _Column(heading, texts, top=curve.best_layer if len(texts) > 1 else None, feet=[*map(number, baselines)])


def _tables(
    layers: Sequence[int], columns: Sequence[_Column], *, caption: str, feet: Sequence[str], winner: int | None
) -> str:
    if not columns:
        return ""
    count = math.ceil(len(columns) / _WIDEST)
    size = math.ceil(len(columns) / count)
    parts = [columns[start : start + size] for start in range(0, len(columns), size)]
    return "".join(
        _table(layers, part, caption=caption + (f", {place} of {count}" if count > 1 else ""), feet=feet, winner=winner)
        for place, part in enumerate(parts, start=1)
    )


def _table(
    layers: Sequence[int], columns: Sequence[_Column], *, caption: str, feet: Sequence[str], winner: int | None
) -> str:
    heads = "".join(f'<th scope="col">{column.heading}</th>' for column in columns)
    rows = "".join(
        f'<tr{_WINNER if layer == winner else ""}><th scope="row">{layer}</th>'
        + "".join(_cell(column, layer) for column in columns)
        + "</tr>"
        for layer in layers
    )
    last = "".join(
        _foot(name, [column.feet[n] if column.feet else "" for column in columns]) for n, name in enumerate(feet)
    )
    tail = f"<tfoot>{last}</tfoot>" if last else ""
    head = f'<caption>{escape(caption)}</caption><thead><tr><th scope="col">Layer</th>{heads}</tr></thead>'
    return _scrolling(f"{head}<tbody>{rows}</tbody>{tail}", label=caption)


def _foot(name: str, texts: Sequence[str]) -> str:
    if all(text in ("", number(None)) for text in texts):
        return ""
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{text}</td>" for text in texts)}</tr>'


def _cell(column: _Column, layer: int) -> str:
    return f"<td{_TOP if layer == column.top else ''}>{column.texts.get(layer, '–')}</td>"
