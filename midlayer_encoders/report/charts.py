"""What a picture shows, in data: panels of lines, points, bars and cells over two axes. Two renderers draw it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from midlayer_encoders.report.axes import Axis
from midlayer_encoders.report.ticks import padded, significant

__all__ = [
    "Bars", "Cells", "Chart", "Dots", "Front", "Keyed", "Level", "Line", "Mark", "Panel", "Part", "Rule", "Scale",
    "Word", "layer_tips", "value_axis",
]  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        x: in order.
        y: of each x; one that is not finite breaks the curve.
        label: in the key; empty for none.
        style: number of its color and dashes.
        tips: a text for each point, shown when it is pointed at; empty for its label and values.
        band: lower and upper end of the interval at each x, drawn as a shade; empty for none.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    label: str = ""
    style: int = 0
    tips: tuple[str, ...] = ()
    band: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Dots:
    """Dots without a curve through them.

    Attributes:
        x: of each.
        y: of each.
        kind: ``disc``, ``ring``, ``dot`` (small and faint) or ``tick`` (an upright stroke).
        label: in the key; empty for none.
        style: number of their color.
        tips: a text for each.
        spans: left and right end of the interval of each, drawn as a stroke; empty for none.
        links: address of the page that each opens; empty for none.
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
class Front:
    """The best that can be had for each x or less: level from a point to the next, and there up to it."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    label: str = ""


@dataclass(frozen=True)
class Mark:
    """A point with a meaning of its own, and its text where there is room for words."""

    kind: Literal["best", "last"]
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Level:
    """A value to compare with all along the axis, such as a baseline's; ``label`` is for the key.

    ``style`` tells several apart by their dashes.
    """

    value: float
    text: str
    label: str = ""
    style: int = 0


@dataclass(frozen=True)
class Rule:
    """An upright line: at the layer that was chosen, or at a value to compare with."""

    x: float
    kind: Literal["chosen", "plain"] = "plain"


@dataclass(frozen=True)
class Word:
    """A text to the right of a place, or centered on it."""

    x: float
    y: float
    text: str
    bold: bool = False
    centered: bool = False


@dataclass(frozen=True)
class Bars:
    """Upright bars from ``base`` to each top."""

    x: tuple[float, ...]
    tops: tuple[float, ...]
    base: float
    tips: tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """What the colors of cells mean.

    Attributes:
        low: value at which they begin.
        high: value at which they end.
        ends: the two in words.
        label: of the quantity.
        falling: whether low values have the strong color.
        capped: whether values beyond ``high`` have its color.
    """

    low: float
    high: float
    ends: tuple[str, str]
    label: str = ""
    falling: bool = False
    capped: bool = False

    def strength(self, value: float) -> float:
        """Return how strong the color of a value is, in ``[0, 1]``."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        share = min(max(share, 0.0), 1.0)
        return 1 - share if self.falling else share


@dataclass(frozen=True)
class Cells:
    """A map of values at whole places: column k of row r is centered on ``(k, r)``.

    Attributes:
        values: R rows of C columns; one that is not finite has no color.
        tips: a text for each.
        scale: of the colors.
        peaks: column of the cell to point out in each row; empty for none.
        labels: what each row shows, for those who cannot see it; empty for its name.
        apart: whether the first row stands apart from the others.
    """

    values: tuple[tuple[float, ...], ...]
    tips: tuple[tuple[str, ...], ...]
    scale: Scale
    peaks: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    apart: bool = False


Part: TypeAlias = Line | Dots | Front | Mark | Level | Rule | Word | Bars | Cells
Keyed: TypeAlias = Line | Dots | Front | Level


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        title: above it.
        x: the axis to the right.
        y: the axis upward.
        parts: what is drawn, the first at the back; none for a title alone.
        label: what it shows, for those who cannot see it; the title where empty.
        caption: a few words below the title.
        ordered: number of colors where styles are steps of one amount; 0 where they tell things apart.
        gain: text of the distance between the marks.
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
        """Its curves."""
        return tuple(part for part in self.parts if isinstance(part, Line))

    @property
    def cells(self) -> Cells | None:
        """Its map, if it is one."""
        return next((part for part in self.parts if isinstance(part, Cells)), None)

    @property
    def key(self) -> dict[str, Keyed]:
        """What has a label, by it; of several with the same one the first."""
        found: dict[str, Keyed] = {}
        for part in self.parts:
            if isinstance(part, Keyed) and part.label:
                found.setdefault(part.label, part)
        return found

    def tips(self, part: Line | Dots) -> tuple[str, ...]:
        """Return the text of each point."""
        if part.tips:
            return part.tips
        name = f"{part.label or self.title}, {self.x.label}"
        return tuple(f"{name} {x:g}: {significant(y)}" for x, y in zip(part.x, part.y, strict=True))


@dataclass(frozen=True)
class Chart:
    """Panels that belong together.

    Attributes:
        panels: from left to right, row by row.
        columns: panels in a row of a figure; 0 for as many as fit.
        size: width and height of a panel of a figure, in inches.
        head: whether the first panel stands above the others, as wide as all of them, with words at its marks.
        stack: how many successive panels stand on top of each other in one place.
        title: of the whole.
        y_label: of the whole.
        shared_key: whether one key serves all panels.
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
    def across(self) -> int:
        """How many panels stand in a row of a figure."""
        count = (len(self.panels) - self.head) // self.stack
        return self.columns or max(min(count, 3 if count <= 9 else 4), 1)

    @property
    def key(self) -> dict[str, Keyed]:
        """What has a label in any panel; a panel may lack some."""
        found: dict[str, Keyed] = {}
        for panel in self.panels:
            found = {**found, **{label: part for label, part in panel.key.items() if label not in found}}
        return found

    @property
    def scale(self) -> Scale | None:
        """The scale that all maps share; none where each has one of its own, which needs no label."""
        found = {panel.cells.scale for panel in self.panels if panel.cells and panel.cells.scale.label}
        return next(iter(found), None)


def value_axis(parts: Sequence[Part], label: str = "", *, pad: float = 0.08) -> Axis:
    """Return an axis that holds all curves, intervals and levels, with a little room.

    Example:
        >>> value_axis([Line((0, 1), (1.0, 2.0), band=((0.0, 2.0), (1.0, 10.0)))], pad=0.1).high
        11.0
    """
    lines = [part for part in parts if isinstance(part, Line)]
    values = [value for line in lines for value in (*line.y, *(end for ends in line.band for end in ends))]
    values += [part.value for part in parts if isinstance(part, Level)]
    return Axis(label, *padded([value for value in values if math.isfinite(value)] or [0.0], pad))


def layer_tips(
    name: str,
    layers: Sequence[int],
    values: Sequence[float],
    write: Callable[[float], str] = significant,
    costs: Mapping[int, str] | None = None,
) -> tuple[str, ...]:
    r"""Return the text of each layer of a curve, its value as ``write`` gives it, and what the layer costs.

    Example:
        >>> layer_tips("lidar", [0, 1], [31.0, 2 / 3], costs={1: "2.0 M parameters"})
        ('lidar, layer 0: 31', 'lidar, layer 1: 0.6667\n2.0 M parameters')
    """
    known = {layer: f"\n{words}" for layer, words in (costs or {}).items()}
    return tuple(
        f"{name}, layer {layer}: {write(value)}{known.get(layer, '')}"
        for layer, value in zip(layers, values, strict=True)
    )
