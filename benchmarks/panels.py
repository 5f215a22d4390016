"""Panels of curves as data, for the figures of benchmarks: parts over two axes, drawn with the package's helpers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from midlayer_encoders.report import drawing
from midlayer_encoders.report.style import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Axis:
    """An axis; its kind selects the ticks of layers or amounts, ``None`` those in ``ticks``."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()
    log: bool = False
    kind: Literal["layers", "amounts"] | None = None


@dataclass(frozen=True)
class Line:
    """A curve."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    label: str = ""
    style: int = 0


@dataclass(frozen=True)
class Dots:
    """Separate dots."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: Literal["disc", "ring"] = "disc"
    style: int = 0


@dataclass(frozen=True)
class Level:
    """A horizontal line."""

    value: float
    text: str
    label: str = ""


@dataclass(frozen=True)
class Rule:
    """A vertical line."""

    x: float


@dataclass(frozen=True)
class Word:
    """A bold text to the right of a position, in the color of a curve if it has a style."""

    x: float
    y: float
    text: str
    style: int | None = None


Part: TypeAlias = Line | Dots | Level | Rule | Word


@dataclass(frozen=True)
class Panel:
    """One plot; ``ordered`` is the number of colors if styles are steps of one quantity."""

    title: str
    x: Axis
    y: Axis
    parts: tuple[Part, ...]
    ordered: int = 0


def layer_axis(num_layers: int, *, room: float = 0.0) -> Axis:
    """Return an axis of layers, extended by ``room`` at both ends."""
    return Axis("layer", -room, num_layers, kind="layers")


def amount_axis(label: str, amounts: Sequence[float]) -> Axis:
    """Return an axis of positive amounts."""
    return Axis(label, min(amounts), max(amounts), kind="amounts")


def value_axis(parts: Sequence[Part], label: str = "") -> Axis:
    """Return an axis that holds all curves and levels with a margin."""
    values = [value for part in parts if isinstance(part, Line) for value in part.y]
    values += [part.value for part in parts if isinstance(part, Level)]
    return Axis(label, *drawing.pad_range(values))


def draw(panels: Sequence[Panel], *, columns: int = 0, size: tuple[float, float] = (3.2, 2.2)) -> Figure:
    """Return the figure of panels."""
    figure, grid = drawing.panel_grid(len(panels), columns=columns, size=size)
    for axes, panel in zip(grid, panels, strict=True):
        for part in panel.parts:
            _draw_part(axes, part, panel.ordered)
        _set_axes(axes, panel)
        drawing.set_title(axes, panel.title)
    return drawing.finish(figure)


def _draw_part(axes: Axes, part: Part, ordered: int) -> None:
    match part:
        case Line():
            drawing.draw_points(axes, part.x, part.y, label=part.label, style=part.style, ordered=ordered)
        case Dots():
            drawing.draw_points(axes, part.x, part.y, part.kind, style=part.style, ordered=ordered)
        case Level():
            drawing.draw_level(axes, part.value, part.label)
        case Rule():
            drawing.draw_rule(axes, part.x)
        case Word():
            style: Any = {"ha": "left", "va": "center", "weight": "bold", "fontsize": 8, "textcoords": "offset points"}
            color = "black" if part.style is None else SERIES[part.style]
            axes.annotate(part.text, (part.x, part.y), (7, 0), color=color, **style)


def _set_axes(axes: Axes, panel: Panel) -> None:
    x, y = panel.x, panel.y
    if x.kind == "layers":
        drawing.layer_axis(axes, int(x.high), room=-x.low)
    elif x.kind == "amounts":
        drawing.amount_axis(axes, x.label, (x.low, x.high))
    else:
        margin = 0 if x.log else 0.03 * (x.high - x.low)
        axes.set(xscale="log" if x.log else "linear", xlabel=x.label, xlim=(x.low - margin, x.high + margin))
        axes.minorticks_off()
        if x.ticks:
            axes.set_xticks(*zip(*x.ticks, strict=True))
    axes.set(ylim=(y.low, y.high), ylabel=y.label)
    if y.ticks:
        axes.set_yticks(*zip(*y.ticks, strict=True))
