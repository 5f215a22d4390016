"""The page's charts of scores and metrics over depth, each with its caption."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from midlayer_encoders.frame import Series
from midlayer_encoders.frame.summaries import Curve, Summary, average_baseline
from midlayer_encoders.report.style import DASHES, SERIES
from midlayer_encoders.report.svg import PANEL, PHONE, WIDE, Level, Line, Mark, Size, chart
from midlayer_encoders.report.tables import breakable
from midlayer_encoders.report.ticks import number, signed

__all__ = ["average_chart", "legend_list", "metric_panels", "panel_grid", "task_panels"]

_STYLES = len(SERIES) * len(DASHES)


def average_chart(found: Summary, average: Curve, baselines: Mapping[str, float], baseline_name: str) -> str:
    """Return the figure of the average by depth: a wide one, and a narrow one for phones."""
    base = average_baseline(found, baselines)
    level = Level(base, f"{baseline_name} {number(base)}") if base is not None else None
    one = found.tasks[0].name if len(found.tasks) == 1 else ""
    of = f"{one} ({found.tasks[0].measure})" if one else f"Average of {len(found.tasks)} tasks"
    drawn = ""
    for shown, size in (("wide", WIDE), ("narrow", PHONE)):
        image = _score_chart(average, found.num_layers, size=size, level=level, name=one or "average")
        drawn += f'<div class="{shown}">{image}</div>'
    caption = (
        f"{escape(of)} by layer, in points (score × 100). The axis does not start at zero. The best layer is "
        "picked by the scores that it is shown with, so a gain of a fraction of a point may be luck."
    )
    return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"


def task_panels(found: Summary, baselines: Mapping[str, float], baseline_name: str) -> str:
    """Return a small figure for each task."""
    panels = []
    for task in found.tasks:
        base = 100 * baselines[task.name] if task.name in baselines else None
        level = Level(base, f"{baseline_name} {number(base)}") if base is not None else None
        drawn = _score_chart(task, found.num_layers, size=PANEL, level=level, name=task.name)
        caption = f"<figcaption><h3>{breakable(task.name)}</h3>{_task_words(task, level)}</figcaption>"
        panels.append(f"<figure>{caption}{drawn}</figure>")
    dashed = f'; the dashed line is <span class="whole">{escape(baseline_name)}</span>' if baselines else ""
    key = f"Each task by layer, in points, on its own scale. Disc: best layer; square: last layer{dashed}."
    return f'<p class="soft">{key}</p>{panel_grid(panels)}'


def metric_panels(metrics: Mapping[str, Sequence[Series]], num_layers: int, *, rule: int | None) -> str:
    """Return a small figure for each metric, a line for each set of texts, and the key to the lines."""
    labels = list(dict.fromkeys(series.label for many in metrics.values() for series in many))
    styles = {label: place % _STYLES for place, label in enumerate(labels)}
    panels = [
        f"<figure><figcaption><h3>{breakable(name)}</h3></figcaption>"
        f"{_metric_chart(name, many, num_layers, styles=styles, rule=rule)}</figure>"
        for name, many in metrics.items()
    ]
    upright = f" The upright line is layer {rule}, the best by score." if rule is not None else ""
    words = f'<p class="soft">Each metric by layer, on its own scale.{upright}{_gaps(metrics)}</p>'
    key = legend_list(styles) if len(labels) > 1 else ""
    return f"{words}{key}{panel_grid(panels)}"


def legend_list(styles: Mapping[str, int]) -> str:
    """Return the key to lines: a sample of each style beside its label."""
    samples = "".join(
        f'<li><svg viewBox="0 0 32 12" aria-hidden="true"><g class="line s{style}"><path d="M0 6H32"/></g></svg>'
        f"{escape(label)}</li>"
        for label, style in styles.items()
    )
    return f'<ul class="legend">{samples}</ul>'


def panel_grid(panels: Sequence[str]) -> str:
    """Return small figures side by side."""
    # Three in a row where four would leave one alone in the last.
    columns = 3 if len(panels) in (1, 2, 3, 5, 6, 9) else 4
    return f'<div class="panels" style="--columns:{columns}">{"".join(panels)}</div>'


def _score_chart(curve: Curve, num_layers: int, *, size: Size, level: Level | None, name: str) -> str:
    points = list(curve.points.items())
    tips = [f"{name}, layer {layer}: {number(value)}" for layer, value in points]
    best = Mark("best", curve.best_layer, curve.best, f"layer {curve.best_layer}: {number(curve.best)}")
    last = Mark("last", curve.last_layer, curve.last, f"last: {number(curve.last)}")
    label = (
        f"{name} by layer: best {number(curve.best)} at layer {curve.best_layer}, "
        f"{number(curve.last)} at the last, layer {curve.last_layer}"
    )
    return chart(
        [Line(points, tips)],
        num_layers,
        size=size,
        label=label + (f"; {level.text}" if level else ""),
        marks=[last, best] if curve.best_layer != curve.last_layer else [best],
        level=level,
        gain=signed(curve.gain) + (" points" if size is WIDE else ""),
    )


def _metric_chart(
    name: str, many: Sequence[Series], num_layers: int, *, styles: Mapping[str, int], rule: int | None
) -> str:
    lines = [
        Line(
            list(zip(series.layers, series.values, strict=True)),
            [
                f"{series.label or name}, layer {layer}: {value:.4g}"
                for layer, value in zip(series.layers, series.values, strict=True)
            ],
            styles[series.label],
        )
        for series in many
    ]
    return chart(lines, num_layers, size=PANEL, label=f"{name} by layer", rule=rule)


def _task_words(task: Curve, level: Level | None) -> str:
    words = [task.measure, f"best {number(task.best)} at {task.best_layer}"]
    if task.best_layer != task.last_layer:
        words.append(f"last {number(task.last)} ({signed(-task.gain)})")
    if level:
        words.append(level.text)
    parts = [*(f"{word} ·" for word in words[:-1]), words[-1]]
    return " ".join(f'<span class="whole">{escape(part)}</span>' for part in parts)


def _gaps(metrics: Mapping[str, Sequence[Series]]) -> str:
    broken = [name for name, many in metrics.items() if any(not all(map(math.isfinite, one.values)) for one in many)]
    return f" Not finite at some layers, and broken there: {escape(', '.join(broken))}." if broken else ""
