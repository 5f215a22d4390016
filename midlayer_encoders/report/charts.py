"""Charts as data: panels of curves, dots, bars and heat maps over two axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from midlayer_encoders.frame.pareto import amount
from midlayer_encoders.frame.steps import thinned
from midlayer_encoders.report.labels import significant

_LAYER_STEPS = (1, 2, 4, 5, 6, 8, 10, 12, 16, 20, 25, 40, 50, 100, 200)
_LOG_RATIO = 5  # between the extremes of an axis of amounts, from which it is logarithmic
_MAX_LOG_TICKS = 6


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: the quantity.
        low: value at the left or bottom end; above ``high`` if values run downward.
        high: value at the other end.
        ticks: positions and their texts; empty for automatic ones.
        whole: whether automatic ticks are layers.
        log: whether the axis is logarithmic; its ticks must be set.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()
    whole: bool = False
    log: bool = False

    @property
    def named(self) -> bool:
        """Whether the axis has one named row per tick, from the top down."""
        return self.low > self.high


DEPTH = Axis(
    "depth (layer / number of layers)", 0, 1, ticks=tuple((quarter / 4, f"{25 * quarter} %") for quarter in range(5))
)
"""The axis for models of different depth."""


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        x: positions, ascending.
        y: value at each position; the curve has a gap where a value is not finite.
        label: in the legend; empty for none.
        style: index of the color and dashes.
        tips: tooltip of each point; by default its label and value.
        band: lower and upper end of the interval at each position, shaded; empty for none.
        front: whether this is a Pareto front, a broad staircase without points.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    label: str = ""
    style: int = 0
    tips: tuple[str, ...] = ()
    band: tuple[tuple[float, float], ...] = ()
    front: bool = False


@dataclass(frozen=True)
class Dots:
    """Separate dots.

    Attributes:
        x: position of each dot.
        y: value of each dot.
        kind: ``disc``, ``ring``, ``dot`` (small and faint) or ``tick`` (a vertical stroke).
        label: in the legend; empty for none.
        style: index of the color.
        tips: tooltip of each dot; by default its label and value.
        spans: left and right end of the interval of each dot, drawn as a line; empty for none.
        links: URL that each dot opens; empty for none.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: Literal["disc", "ring", "dot", "tick"] = "disc"
    label: str = ""
    style: int = 0
    tips: tuple[str, ...] = ()
    spans: tuple[tuple[float, float], ...] = ()
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mark:
    """The best or the last layer of a curve; large panels show its text."""

    kind: Literal["best", "last"]
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Level:
    """A horizontal line, such as a baseline; ``style`` selects its dashes, ``label`` its place in the legend."""

    value: float
    text: str
    label: str = ""
    style: int = 0


@dataclass(frozen=True)
class Rule:
    """A vertical line at the chosen layer or at a reference value."""

    x: float
    kind: Literal["chosen", "plain"] = "plain"


@dataclass(frozen=True)
class Word:
    """A text to the right of a position, or centered on it."""

    x: float
    y: float
    text: str
    bold: bool = False
    centered: bool = False


@dataclass(frozen=True)
class Bars:
    """Vertical bars from ``base`` to each top."""

    x: tuple[float, ...]
    tops: tuple[float, ...]
    base: float
    tips: tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """The color scale of a heat map.

    Attributes:
        low: value of the first color.
        high: value of the last color.
        ends: text of each end.
        label: the quantity.
        falling: whether low values are dark.
        capped: whether values above ``high`` occur and get its color.
    """

    low: float
    high: float
    ends: tuple[str, str]
    label: str = ""
    falling: bool = False
    capped: bool = False

    def strength(self, value: float) -> float:
        """Return the darkness of the color of a value, in ``[0, 1]``."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        share = min(max(share, 0.0), 1.0)
        return 1 - share if self.falling else share


@dataclass(frozen=True)
class Cells:
    """A heat map; the cell in column k of row r is centered on ``(k, r)``.

    Attributes:
        values: R rows of C columns; a value that is not finite is gray.
        tips: tooltip of each cell.
        scale: the color scale.
        peaks: column of the outlined cell of each row; empty for none.
        labels: description of each row for screen readers; by default its name.
        apart: whether a gap separates the first row from the others.
    """

    values: tuple[tuple[float, ...], ...]
    tips: tuple[tuple[str, ...], ...]
    scale: Scale
    peaks: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    apart: bool = False


Part: TypeAlias = Line | Dots | Mark | Level | Rule | Word | Bars | Cells
Keyed: TypeAlias = Line | Dots | Level


@dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        title: above the plot.
        x: the horizontal axis.
        y: the vertical axis.
        parts: drawn in this order; empty for a title without a plot.
        label: description for screen readers; by default the title.
        caption: short texts below the title.
        ordered: number of colors if styles are steps of one quantity; 0 if they are categories.
        gain: text of the difference between the marks.
    """

    title: str
    x: Axis
    y: Axis
    parts: tuple[Part, ...]
    label: str = ""
    caption: tuple[str, ...] = ()
    ordered: int = 0
    gain: str = ""

    @property
    def lines(self) -> tuple[Line, ...]:
        """The curves."""
        return tuple(part for part in self.parts if isinstance(part, Line) and not part.front)

    @property
    def cells(self) -> Cells | None:
        """The heat map, if the panel is one."""
        return next((part for part in self.parts if isinstance(part, Cells)), None)

    @property
    def key(self) -> dict[str, Keyed]:
        """The first part with each label."""
        return _first_by_label(part for part in self.parts if isinstance(part, Keyed) and part.label)

    def tips(self, part: Part) -> tuple[str, ...]:
        """Return the tooltip of each point, bar or cell of a part."""
        match part:
            case Cells():
                return tuple(tip for row in part.tips for tip in row)
            case Mark() | Level():
                return (part.text,)
            case Rule() | Word():
                return ()
        if part.tips or isinstance(part, Bars):
            return part.tips
        name = f"{part.label or self.title}, {self.x.label}"
        return tuple(f"{name} {x:g}: {significant(y)}" for x, y in zip(part.x, part.y, strict=True))


@dataclass(frozen=True)
class Chart:
    """Panels that belong together.

    Attributes:
        panels: row by row.
        columns: panels per row of a figure; 0 for automatic.
        size: width and height of a panel of a figure, in inches.
        head: whether the first panel spans a row and shows the texts of its marks.
        stack: number of successive panels stacked in one place.
        title: of the whole figure.
        y_label: of the whole figure.
        shared_key: whether all panels share one legend.
    """

    panels: tuple[Panel, ...]
    columns: int = 0
    size: tuple[float, float] = (3.2, 2.2)
    head: bool = False
    stack: int = 1
    title: str = ""
    y_label: str = ""
    shared_key: bool = True

    @property
    def columns_used(self) -> int:
        """Number of panels per row of a figure."""
        count = (len(self.panels) - self.head) // self.stack
        return self.columns or max(min(count, 3 if count <= 9 else 4), 1)

    @property
    def key(self) -> dict[str, Keyed]:
        """The first part with each label in any panel."""
        return _first_by_label(part for panel in self.panels for part in panel.key.values())

    @property
    def scale(self) -> Scale | None:
        """The labeled scale that all heat maps share, if there is one."""
        scales = [panel.cells.scale for panel in self.panels if panel.cells and panel.cells.scale.label]
        return scales[0] if scales else None


def _first_by_label(parts: Iterable[Keyed]) -> dict[str, Keyed]:
    first: dict[str, Keyed] = {}
    for part in parts:
        first.setdefault(part.label, part)
    return first


def layer_axis(num_layers: int, *, room: float = 0.0) -> Axis:
    """Return an axis of layers, extended by ``room`` at both ends."""
    return Axis("layer", -room, max(num_layers, 1) + room, whole=True)


def named_axis(names: Sequence[str]) -> Axis:
    """Return an axis with one row per name, the first at the top."""
    return Axis("", len(names) - 0.5, -0.5, ticks=tuple(enumerate(names)))


def place_axis(label: str, names: Sequence[object], max_ticks: int = 6) -> Axis:
    """Return an axis with one place per name, of which evenly spaced ones, including the last, are labeled.

    Consecutive layers from 0 are labeled at round numbers instead.

    Example:
        >>> place_axis("layer", [0, 4, 8, 12], max_ticks=2).ticks
        ((0, '0'), (3, '12'))
        >>> [text for _, text in place_axis("layer", range(31), max_ticks=9).ticks]
        ['0', '5', '10', '15', '20', '25', '30']
    """
    consecutive = list(names) == list(range(len(names)))
    places = layer_ticks(len(names) - 1, max_ticks) if consecutive else thinned(len(names), max_ticks)
    ticks = tuple((place, str(names[place])) for place in places)
    return Axis(label, -0.5, len(names) - 0.5, ticks)


def amount_axis(label: str, amounts: Sequence[float]) -> Axis:
    """Return an axis of positive amounts, logarithmic if they differ by a factor of five or more.

    Example:
        >>> [text for _, text in amount_axis("parameters", [22e6, 1.1e9]).ticks]
        ['20M', '50M', '100M', '200M', '500M', '1B']
        >>> amount_axis("bytes", [1024, 1536]).log
        False
    """
    low, high = min(amounts), max(amounts)
    if high < _LOG_RATIO * low:
        return Axis(label, *padded([low, high]))
    low, high = low / 1.2, high * 1.2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for multiples in ((1,), (1, 3), (1, 2, 5)):
        values = [multiple * 10.0**power for power in powers for multiple in multiples]
        finer = [value for value in values if low <= value <= high]
        if len(finer) <= _MAX_LOG_TICKS or not ticks:
            ticks = finer
    return Axis(label, low, high, tuple((tick, amount(tick)) for tick in ticks), log=True)


def value_axis(parts: Sequence[Part], label: str = "", *, pad: float = 0.08) -> Axis:
    """Return an axis that holds all curves, intervals and levels with a margin.

    Example:
        >>> value_axis([Line((0, 1), (1.0, 2.0), band=((0.0, 2.0), (1.0, 10.0)))], pad=0.1).high
        11.0
    """
    lines = [part for part in parts if isinstance(part, Line)]
    values = [value for line in lines for value in (*line.y, *(end for ends in line.band for end in ends))]
    values += [part.value for part in parts if isinstance(part, Level)]
    return Axis(label, *padded([value for value in values if math.isfinite(value)] or [0.0], pad))


def padded(values: Sequence[float], pad: float = 0.08) -> tuple[float, float]:
    """Return a range that holds the values with a margin, never of width 0.

    Example:
        >>> padded([10.0, 20.0], pad=0.1), padded([5.0])
        ((9.0, 21.0), (4.75, 5.25))
    """
    low, high = min(values), max(values)
    # Rounding noise of a constant must not become a curve.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = 0.05 * abs(high) or 1.0
        return low - margin, high + margin
    return low - pad * (high - low), high + pad * (high - low)


def layer_ticks(num_layers: int, max_ticks: int) -> list[int]:
    """Return evenly spaced layers from 0 to ``num_layers``, including the last if possible.

    Example:
        >>> layer_ticks(30, 7), layer_ticks(24, 4), layer_ticks(2, 8)
        ([0, 5, 10, 15, 20, 25, 30], [0, 8, 16, 24], [0, 1, 2])
    """
    fitting = [step for step in _LAYER_STEPS if num_layers // step + 1 <= max_ticks] or [max(num_layers, 1)]
    # A slightly coarser step that ends at the last layer is better than the finest one.
    step = next((step for step in fitting if num_layers % step == 0 and step <= 2 * fitting[0]), fitting[0])
    return list(range(0, num_layers + 1, step))


def layer_tips(
    name: str,
    layers: Sequence[int],
    values: Sequence[float],
    write: Callable[[float], str] = significant,
    costs: Mapping[int, str] | None = None,
) -> tuple[str, ...]:
    r"""Return the tooltip of each layer of a curve: its value, formatted by ``write``, and its costs.

    Example:
        >>> layer_tips("lidar", [0, 1], [31.0, 2 / 3], costs={1: "2.0 M parameters"})
        ('lidar, layer 0: 31', 'lidar, layer 1: 0.6667\n2.0 M parameters')
    """
    suffixes = {layer: f"\n{text}" for layer, text in (costs or {}).items()}
    return tuple(
        f"{name}, layer {layer}: {write(value)}{suffixes.get(layer, '')}"
        for layer, value in zip(layers, values, strict=True)
    )
