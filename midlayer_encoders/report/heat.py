"""The heat map: how far each layer is below each task's best."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from midlayer_encoders.frame.summaries import Curve
from midlayer_encoders.report.ticks import number

__all__ = ["heat_map", "losses", "widest_loss"]

_PEAK = 'class="peak" '


def losses(curve: Curve) -> dict[int, float]:
    """Return how many points each layer is below the best one of the same task.

    Example:
        >>> losses(Curve("STS", "cosine_spearman", {0: 40.0, 1: 60.0, 2: 55.0}))
        {0: 20.0, 1: 0.0, 2: 5.0}
    """
    best = curve.best
    return {layer: best - value for layer, value in curve.points.items()}


def widest_loss(curves: Sequence[Curve]) -> float:
    """Return the loss at which the colours end: nine in ten are within, so that one bad layer hides nothing."""
    every = [loss for curve in curves for loss in losses(curve).values()]
    return max(float(np.quantile(every, 0.9)), 1.0)


def heat_map(curves: Sequence[Curve], *, average: Curve | None) -> str:
    """Return the HTML of a strip for the average and for each task, a cell for each layer."""
    layers = sorted(set().union(*(curve.points for curve in curves)))
    widest = widest_loss(curves)
    rows = [average, *curves] if average and len(curves) > 1 else list(curves)
    strips = [
        f'<div class="{"average" if curve is average else "task"}">{escape(curve.name)}</div>'
        + _strip(curve, layers, widest)
        for curve in rows
    ]
    ends = "<span>0 below its best</span>", f"<span>{number(widest)} points or more below</span>"
    return (
        f'<div class="heat">{"".join(strips)}<div class="layers" aria-hidden="true">{_layer_words(layers)}</div></div>'
        f'<div class="scale">{ends[0]}{_legend()}{ends[1]}</div>'
    )


def _strip(curve: Curve, layers: Sequence[int], widest: float) -> str:
    cells, peak = [], ""
    below, best = losses(curve), curve.best_layer
    for column, layer in enumerate(layers):
        if layer not in curve.points:
            tip = escape(f"{curve.name}, layer {layer}: not scored")
            cells.append(f'<path class="gap" d="M{column} 1L{column + 1} 0"><title>{tip}</title></path>')
            continue
        value, loss = curve.points[layer], below[layer]
        tip = escape(f"{curve.name}, layer {layer}: {number(value)}, {number(loss)} below its best")
        top = layer == best
        shape = f'x="{column}" width="1" height="1" fill-opacity="{_strength(loss, widest)}"'
        cell = f"<rect {_PEAK if top else ''}{shape}><title>{tip}</title></rect>"
        if top:
            peak = cell  # drawn last, so that its outline is whole
        else:
            cells.append(cell)
    label = escape(f"{curve.name}: best at layer {best}, {number(curve.best)} points")
    view = f'viewBox="0 0 {len(layers)} 1" preserveAspectRatio="none"'
    return f'<svg class="strip" {view} role="img" aria-label="{label}">{"".join(cells)}{peak}</svg>'


def _strength(loss: float, widest: float) -> float:
    return round(1 - 0.92 * min(loss / widest, 1.0), 2)


def _legend() -> str:
    cells = "".join(f'<rect x="{k}" width="1.02" height="1" fill-opacity="{_strength(k, 9)}"/>' for k in range(10))
    return f'<svg class="strip" viewBox="0 0 10 1" preserveAspectRatio="none" aria-hidden="true">{cells}</svg>'


def _layer_words(layers: Sequence[int]) -> str:
    every = -(-len(layers) // 9)
    return "".join(
        f'<span style="left:{100 * (column + 0.5) / len(layers):.2f}%">{layer}</span>'
        for column, layer in enumerate(layers)
        if column % every == 0
    )
