"""Small line charts as SVG text: colours come from the page's CSS, so that they follow its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from midlayer_encoders.report.ticks import layer_ticks, padded, value_ticks

__all__ = ["PANEL", "PHONE", "WIDE", "Level", "Line", "Mark", "Size", "chart"]


@dataclass(frozen=True)
class Size:
    """Of a chart, in its own units (CSS pixels where it is shown at its width).

    Attributes:
        width: of the whole.
        height: of the whole.
        left: room for the labels of the values.
        right: room for the label of the last layer.
        top: room above the curve.
        ticks: most ticks on the two axes, layers first.
        words: whether marks carry their text.
    """

    width: int
    height: int
    left: int
    right: int
    top: int
    ticks: tuple[int, int]
    words: bool


WIDE = Size(780, 320, 44, 112, 30, (16, 6), words=True)
PHONE = Size(343, 260, 36, 68, 30, (7, 5), words=True)
PANEL = Size(220, 124, 42, 10, 8, (5, 3), words=False)
_BOTTOM = 24


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        points: layer and value, in order; a value that is not finite breaks the line.
        tips: a text for each point, shown when it is pointed at.
        style: number of its colour and dashes.
        band: lower and upper end of each point's interval, drawn as a shade behind the curve; empty for none.
    """

    points: Sequence[tuple[float, float]]
    tips: Sequence[str]
    style: int = 0
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Mark:
    """A point of a curve that has a meaning: the best layer or the last.

    Attributes:
        kind: decides shape and colour.
        layer: where.
        value: where.
        text: beside it, where the chart has words.
    """

    kind: Literal["best", "last"]
    layer: int
    value: float
    text: str


@dataclass(frozen=True)
class Level:
    """A value to compare with at every layer, such as a baseline's."""

    value: float
    text: str


def chart(
    lines: Sequence[Line],
    num_layers: int,
    *,
    size: Size,
    label: str,
    marks: Sequence[Mark] = (),
    level: Level | None = None,
    gain: str = "",
    rule: int | None = None,
) -> str:
    """Return an SVG of curves over layers.

    Args:
        lines: the curves.
        num_layers: the right end of the axis.
        size: one of ``WIDE``, ``PHONE``, ``PANEL``.
        label: what the picture shows, for those who cannot see it.
        marks: best and last.
        level: a baseline, which is always inside the range.
        gain: text for the distance between the marks.
        rule: layer at which a thin upright line is drawn.

    Example:
        >>> text = chart([Line([(0, 1.0), (1, 2.0)], ["layer 0: 1", "layer 1: 2"])], 1, size=PANEL, label="a line")
        >>> text.startswith('<svg class="chart" viewBox="0 0 220 124" role="img" aria-label="a line">')
        True
    """
    drawn = [value for line in lines for _, value in line.points] + [
        end for line in lines for ends in line.band for end in ends
    ]
    values = [value for value in drawn if math.isfinite(value)]
    low, high = padded([*values, *([level.value] if level else [])] or [0.0])
    frame = _Frame(size, max(num_layers, 1), low, high)
    parts = [
        frame.axes(num_layers),
        frame.upright(rule) if rule is not None else "",
        frame.level(level, lines) if level else "",
        *(frame.line(line) for line in lines),
        frame.marks(marks, gain),
    ]
    view = f'viewBox="0 0 {size.width} {size.height}"'
    return f'<svg class="chart" {view} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


@dataclass(frozen=True)
class _Frame:
    """Layers and values to positions."""

    size: Size
    num_layers: int
    low: float
    high: float

    def x(self, layer: float) -> float:
        span = self.size.width - self.size.left - self.size.right
        return round(self.size.left + span * layer / self.num_layers, 1)

    def y(self, value: float) -> float:
        span = self.size.height - _BOTTOM - self.size.top
        return round(self.size.top + span * (self.high - value) / (self.high - self.low), 1)

    def axes(self, num_layers: int) -> str:
        size, floor = self.size, self.size.height - _BOTTOM
        start, end = self.x(0), self.x(self.num_layers)
        parts = []
        for value, text in value_ticks(self.low, self.high, size.ticks[1]):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{start} {y}H{end}"/>')
            parts.append(f'<text class="tick" x="{size.left - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        parts.append(f'<path class="axis" d="M{start} {floor}H{end}"/>')
        if size.words:
            parts.append(f'<text class="tick" x="{size.left - 8}" y="{floor + 17}" text-anchor="end">layer</text>')
        for layer in layer_ticks(num_layers, size.ticks[0]):
            x = self.x(layer)
            parts.append(f'<path class="axis" d="M{x} {floor}v4"/>')
            parts.append(f'<text class="tick" x="{x}" y="{floor + 17}" text-anchor="middle">{layer}</text>')
        return "".join(parts)

    def upright(self, layer: int) -> str:
        return f'<path class="rule" d="M{self.x(layer)} {self.size.top}V{self.size.height - _BOTTOM}"/>'

    def level(self, level: Level, lines: Sequence[Line]) -> str:
        y, start, end = self.y(level.value), self.x(0), self.x(self.num_layers)
        line = f'<path class="level" d="M{start} {y}H{end}"><title>{escape(level.text)}</title></path>'
        if not self.size.words:
            return line
        x, y = self._clearest(y, 7.5 * len(level.text), lines)
        return f'{line}<text class="word" x="{x:.1f}" y="{y:.1f}">{escape(level.text)}</text>'

    def _clearest(self, y: float, width: float, lines: Sequence[Line]) -> tuple[float, float]:
        """Return where, along a level and above or below it, a text is farthest from every curve."""
        drawn = [
            (self.x(layer), self.y(value)) for line in lines for layer, value in line.points if math.isfinite(value)
        ]
        floor = self.size.height - _BOTTOM

        def room(place: tuple[float, float]) -> float:
            left, base = place
            if not self.size.top < base < floor:
                return -1.0
            return min((abs(py - base + 5) for px, py in drawn if left - 12 < px < left + width + 12), default=floor)

        start, end = self.x(0) + 6, self.x(self.num_layers) - width - 6
        places = [(start + (end - start) * step / 12, y + below) for step in range(13) for below in (-7, 15)]
        return max(places, key=room)

    def line(self, line: Line) -> str:
        path, pen = [], "M"
        dots = []
        for (layer, value), tip in zip(line.points, line.tips, strict=True):
            if not math.isfinite(value):
                pen = "M"
                continue
            x, y = self.x(layer), self.y(value)
            path.append(f"{pen}{x} {y}")
            pen = "L"
            dots.append(f'<circle cx="{x}" cy="{y}" r="2"><title>{escape(tip)}</title></circle>')
        return f'<g class="line s{line.style}">{self._band(line)}<path d="{"".join(path)}"/>{"".join(dots)}</g>'

    def _band(self, line: Line) -> str:
        """Return the shade between the ends of the intervals; points without a finite one are passed over."""
        known = [
            (self.x(layer), self.y(low), self.y(high))
            for (layer, _), (low, high) in zip(line.points, line.band, strict=bool(line.band))
            if math.isfinite(low) and math.isfinite(high)
        ]
        if not known:
            return ""
        corners = [f"{x} {high}" for x, _, high in known] + [f"{x} {low}" for x, low, _ in reversed(known)]
        return f'<path class="band" d="M{"L".join(corners)}Z"/>'

    def marks(self, marks: Sequence[Mark], gain: str) -> str:
        parts = [self._mark(mark) for mark in marks]
        places = {mark.kind: (self.x(mark.layer), self.y(mark.value)) for mark in marks}
        if gain and self.size.words and len(places) == 2:
            (left, top), (right, bottom) = places["best"], places["last"]
            parts.insert(0, f'<path class="gain" d="M{left} {top}H{right + 12}M{right + 12} {top}V{bottom}"/>')
            parts.append(f'<text class="word gain-word" x="{right + 10}" y="{top - 6}">{escape(gain)}</text>')
        return "".join(parts)

    def _mark(self, mark: Mark) -> str:
        x, y, r = self.x(mark.layer), self.y(mark.value), 6 if self.size.words else 4
        title = f"<title>{escape(mark.text)}</title>"
        if mark.kind == "best":
            shape = f'<circle class="best" cx="{x}" cy="{y}" r="{r}">{title}</circle>'
            place = f'x="{min(max(x, self.size.left + 40), self.x(self.num_layers) - 30)}" y="{y - 12}"'
            place += ' text-anchor="middle"'
        else:
            side = 2 * r - 1
            corner = f'x="{x - side / 2:.1f}" y="{y - side / 2:.1f}"'
            shape = f'<rect class="last" {corner} width="{side}" height="{side}">{title}</rect>'
            place = f'x="{x + 10}" y="{y + 15}"'
        words = f'<text class="word {mark.kind}-word" {place}>{escape(mark.text)}</text>' if self.size.words else ""
        return shape + words
