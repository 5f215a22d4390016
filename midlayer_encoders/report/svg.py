"""One panel as SVG text; colors come from the page's CSS, so that they follow its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from midlayer_encoders.report.axes import Axis
from midlayer_encoders.report.charts import Bars, Cells, Dots, Front, Level, Line, Mark, Panel, Part, Rule, Word
from midlayer_encoders.report.style import STYLES
from midlayer_encoders.report.svg_cells import cell_shape, peaks_last, tip_title
from midlayer_encoders.report.ticks import layer_ticks, value_ticks

__all__ = ["ALONE", "MAP", "PAIR", "PANEL", "PHONE", "SMALL", "WIDE", "Size", "level_class", "panel_svg", "rows_size"]


@dataclass(frozen=True)
class Size:
    """Of a picture, in its own units (CSS pixels where it is shown at its width).

    Attributes:
        width: of the whole.
        height: of the whole.
        left: room for the labels of the values.
        right: room for the label of the last layer.
        top: room above the curve.
        ticks: most ticks on the two axes, layers first.
        words: whether marks and levels carry their text.
    """

    width: int
    height: int
    left: int
    right: int
    top: int
    ticks: tuple[int, int]
    words: bool = False


WIDE = Size(780, 320, 44, 112, 30, (16, 6), words=True)
PHONE = Size(343, 260, 36, 76, 30, (7, 5), words=True)
PANEL = Size(220, 124, 42, 10, 8, (5, 3))
ALONE = Size(780, 300, 44, 20, 10, (11, 6))
SMALL = Size(343, 220, 44, 20, 10, (7, 5))
PAIR = Size(380, 200, 44, 14, 10, (7, 5))
MAP = Size(220, 150, 30, 12, 0, (6, 6))
_BOTTOM = 24


def rows_size(panel: Panel) -> Size:
    """Return the size of a panel with a name for each row, which needs room for the names and for words beside."""
    names = max(len(line) for _, text in panel.y.ticks for line in text.split("\n"))
    beside = max((len(part.text) for part in panel.parts if isinstance(part, Word) and not part.centered), default=0)
    left, right = 12 + 6 * names, 14 + 6 * beside
    return Size(left + right + 190, 26 * len(panel.y.ticks) + _BOTTOM + 6, left, right, 6, (5, 3))


def panel_svg(panel: Panel, size: Size) -> str:
    """Return an SVG of a panel.

    Example:
        >>> from midlayer_encoders.report.axes import layer_axis
        >>> from midlayer_encoders.report.charts import value_axis
        >>> line = Line((0, 1), (1.0, 2.0), tips=("layer 0: 1", "layer 1: 2"))
        >>> text = panel_svg(Panel("a line", layer_axis(1), value_axis([line]), (line,)), PANEL)
        >>> text.startswith('<svg class="chart" viewBox="0 0 220 124" role="img" aria-label="a line">')
        True
    """
    canvas = _Canvas(panel, size)
    body = canvas.axes() + canvas.gain() + "".join(canvas.part(part) for part in panel.parts)
    view = f'viewBox="0 0 {size.width} {size.height}"'
    return f'<svg class="chart" {view} role="img" aria-label="{escape(panel.label or panel.title)}">{body}</svg>'


@dataclass(frozen=True)
class _Canvas:
    """A panel's values as positions, and its parts as shapes."""

    panel: Panel
    size: Size

    @property
    def floor(self) -> int:
        return self.size.height - _BOTTOM

    def x(self, value: float) -> float:
        return round(
            self.size.left + (self.size.width - self.size.left - self.size.right) * _share(self.panel.x, value), 1
        )

    def y(self, value: float) -> float:
        return round(self.floor - (self.floor - self.size.top) * _share(self.panel.y, value), 1)

    def axes(self) -> str:
        size, (start, end) = self.size, (self.x(self.panel.x.low), self.x(self.panel.x.high))
        bare = self.panel.cells is not None
        shapes = []
        for value, text in _ticks(self.panel.y, size.ticks[1]):
            y = self.y(value)
            shapes.append("" if bare else f'<path class="grid" d="M{start} {y}H{end}"/>')
            shapes.append(_tick_text(text, size.left - 7, y + 4, "end"))
        if not bare:
            shapes.append(f'<path class="axis" d="M{start} {self.floor}H{end}"/>')
        if size.words:
            shapes.append(_tick_text(self.panel.x.label, size.left - 8, self.floor + 17, "end"))
        for value, text in _ticks(self.panel.x, size.ticks[0]):
            x = self.x(value)
            shapes.append("" if bare else f'<path class="axis" d="M{x} {self.floor}v4"/>')
            shapes.append(_tick_text(text, x, self.floor + 17, "middle"))
        return "".join(shapes)

    def part(self, part: Part) -> str:
        match part:
            case Line():
                return self._line(part)
            case Dots():
                return self._dots(part)
            case Front():
                return self._front(part)
            case Mark():
                return self._mark(part)
            case Level():
                return self._level(part)
            case Rule():
                name = "rule" if part.kind == "chosen" else "axis"
                return f'<path class="{name}" d="M{self.x(part.x)} {self.size.top}V{self.floor}"/>'
            case Word():
                return self._word(part)
            case Bars():
                return self._bars(part)
            case Cells():
                return self._cells(part)

    def _style(self, style: int) -> str:
        return f"s{style if self.panel.ordered else style % STYLES}"

    def _line(self, line: Line) -> str:
        path, dots, pen = [], [], "M"
        for x, y, tip in zip(line.x, line.y, self.panel.tips(line), strict=True):
            if not math.isfinite(y):
                pen = "M"
                continue
            path.append(f"{pen}{self.x(x)} {self.y(y)}")
            dots.append(f'<circle cx="{self.x(x)}" cy="{self.y(y)}" r="2">{tip_title(tip)}</circle>')
            pen = "L"
        shapes = f'{self._band(line)}<path d="{"".join(path)}"/>{"".join(dots)}'
        return f'<g class="line {self._style(line.style)}"{_switch(line.label)}>{shapes}</g>'

    def _band(self, line: Line) -> str:
        """Return the shade between the ends of the intervals; points without a finite one are passed over."""
        known = [
            (self.x(x), self.y(low), self.y(high))
            for x, (low, high) in zip(line.x, line.band, strict=bool(line.band))
            if math.isfinite(low) and math.isfinite(high)
        ]
        if not known:
            return ""
        corners = [f"{x} {high}" for x, _, high in known] + [f"{x} {low}" for x, low, _ in reversed(known)]
        return f'<path class="band" d="M{"L".join(corners)}Z"/>'

    def _dots(self, dots: Dots) -> str:
        places = [(self.x(x), self.y(y)) for x, y in zip(dots.x, dots.y, strict=True)]
        spans = "".join(
            f"M{self.x(low)} {y}H{self.x(high)}"
            for (_, y), (low, high) in zip(places, dots.spans, strict=bool(dots.spans))
        )
        if dots.kind == "tick":  # one path for thousands
            spans += "".join(f"M{x} {y - 6:.1f}v12" for x, y in places)
            shapes = ""
        else:
            radius = {"disc": 4, "ring": 5, "dot": 2}[dots.kind]
            circles = [
                f'<circle class="{dots.kind}" cx="{x}" cy="{y}" r="{radius}">{tip_title(tip)}</circle>'
                for (x, y), tip in zip(places, self.panel.tips(dots), strict=True)
            ]
            linked = zip(circles, dots.links, strict=True) if dots.links else ((one, "") for one in circles)
            shapes = "".join(f'<a href="{escape(link)}">{one}</a>' if link else one for one, link in linked)
        strokes = f'<path d="{spans}"/>' if spans else ""
        return f'<g class="dots {self._style(dots.style)}"{_switch(dots.label)}>{strokes}{shapes}</g>'

    def _front(self, front: Front) -> str:
        (x, y), *others = ((self.x(x), self.y(y)) for x, y in zip(front.x, front.y, strict=True))
        steps = "".join(f"H{right}V{up}" for right, up in others)
        return f'<path class="front"{_switch(front.label)} d="M{x} {y}{steps}"/>'

    def _mark(self, mark: Mark) -> str:
        x, y, r = self.x(mark.x), self.y(mark.y), 6 if self.size.words else 4
        tip = tip_title(mark.text)
        if mark.kind == "best":
            shape = f'<circle class="best" cx="{x}" cy="{y}" r="{r}">{tip}</circle>'
            most = self.x(self.panel.x.high) + 4 - 3.75 * len(mark.text)  # what it gains stands to the right of that
            place = f'x="{min(max(x, self.size.left + 40), most):.1f}" y="{y - 12}"'
            place += ' text-anchor="middle"'
        else:
            side = 2 * r - 1
            corner = f'x="{x - side / 2:.1f}" y="{y - side / 2:.1f}"'
            shape = f'<rect class="last" {corner} width="{side}" height="{side}">{tip}</rect>'
            place = f'x="{x + 10}" y="{y + 15}"'
        words = f'<text class="word {mark.kind}-word" {place}>{escape(mark.text)}</text>' if self.size.words else ""
        return shape + words

    def gain(self) -> str:
        """Return the way from the best mark across and down to the last, and its length in words."""
        places = {part.kind: (self.x(part.x), self.y(part.y)) for part in self.panel.parts if isinstance(part, Mark)}
        if not self.panel.gain or not self.size.words or len(places) < 2:
            return ""
        (left, top), (right, bottom) = places["best"], places["last"]
        return (
            f'<path class="gain" d="M{left} {top}H{right + 12}M{right + 12} {top}V{bottom}"/>'
            f'<text class="word gain-word" x="{right + 10}" y="{top - 6}">{escape(self.panel.gain)}</text>'
        )

    def _level(self, level: Level) -> str:
        y, start, end = self.y(level.value), self.x(self.panel.x.low), self.x(self.panel.x.high)
        switch = _switch(level.label)
        shape = f'<path class="{level_class(level)}"{switch} d="M{start} {y}H{end}">{tip_title(level.text)}</path>'
        if not self.size.words:
            return shape
        x, y = self._clearest(level, 7.5 * len(level.text))
        return f'{shape}<text class="word"{switch} x="{x:.1f}" y="{y:.1f}">{escape(level.text)}</text>'

    def _clearest(self, level: Level, width: float) -> tuple[float, float]:
        """Return where, along a level and above or below it, a text is farthest from every curve and other level."""
        y = self.y(level.value)
        others = [self.y(one.value) for one in self.panel.parts if isinstance(one, Level) and one is not level]
        drawn = [
            (self.x(x), self.y(value))
            for line in self.panel.lines
            for x, value in zip(line.x, line.y, strict=True)
            if math.isfinite(value)
        ]

        def room(place: tuple[float, float]) -> float:
            left, base = place
            if not self.size.top < base < self.floor:
                return -1.0
            beside = [py for px, py in drawn if left - 12 < px < left + width + 12]
            near = [abs(py - base + 5) for py in (*beside, *others)]
            return min(near, default=float(self.floor))

        start, end = self.x(self.panel.x.low) + 6, self.x(self.panel.x.high) - width - 6
        places = [(start + (end - start) * step / 12, y + below) for step in range(13) for below in (-7, 15)]
        return max(places, key=room)

    def _word(self, word: Word) -> str:
        x, anchor = (self.x(word.x), "middle") if word.centered else (self.x(word.x) + 8, "start")
        name = "word bold" if word.bold else "word"
        place = f'x="{x:.1f}" y="{self.y(word.y) + 4:.1f}" text-anchor="{anchor}"'
        return f'<text class="{name}" {place}>{escape(word.text)}</text>'

    def _bars(self, bars: Bars) -> str:
        shapes = []
        for x, top, tip in zip(bars.x, bars.tops, bars.tips, strict=True):
            corners = f"M{self.x(x - 0.4)} {self.y(bars.base)}V{self.y(top)}H{self.x(x + 0.4)}V{self.y(bars.base)}Z"
            shapes.append(f'<path class="bar" d="{corners}">{tip_title(tip)}</path>')
        return "".join(shapes)

    def _cells(self, cells: Cells) -> str:
        columns = [self.x(column - 0.5) for column in range(len(cells.values[0]) + 1)]
        rows = [sorted((self.y(row - 0.5), self.y(row + 0.5))) for row in range(len(cells.values))]
        shapes = [
            cell_shape(cells, row, column, (left, top, right - left, bottom - top))
            for row, (top, bottom) in enumerate(rows)
            for column, (left, right) in enumerate(pairwise(columns))
        ]
        return f'<g class="strip" shape-rendering="crispEdges">{peaks_last(shapes)}</g>'


def level_class(level: Level) -> str:
    """Return the classes of a level's line: dashed, dotted, or both in turn."""
    return ("level", "level dotted", "level mixed")[level.style % 3]


def _switch(label: str) -> str:
    """Return the attribute by which the page's key switches a part on and off."""
    return f' data-curve="{escape(label)}"' if label else ""


def _share(axis: Axis, value: float) -> float:
    """Return where a value stands on an axis, 0 at its low end and 1 at its high end."""
    if axis.log:
        return math.log(value / axis.low) / math.log(axis.high / axis.low)
    return (value - axis.low) / (axis.high - axis.low)


def _ticks(axis: Axis, most: int) -> Sequence[tuple[float, str]]:
    if axis.ticks:
        return axis.ticks
    if axis.whole:
        return [(layer, str(layer)) for layer in layer_ticks(int(axis.high), most)]
    return value_ticks(axis.low, axis.high, most)


def _tick_text(text: str, x: float, y: float, anchor: str) -> str:
    lines = text.split("\n")
    return "".join(
        f'<text class="tick" x="{x:g}" y="{y + 12 * place - 6 * (len(lines) - 1):.1f}" text-anchor="{anchor}">'
        f"{escape(line)}</text>"
        for place, line in enumerate(lines)
    )
