"""What an axis of a panel shows: layers, relative depth, values, names of rows, or places in a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from midlayer_encoders.frame.steps import thinned
from midlayer_encoders.report.ticks import layer_ticks

__all__ = ["DEPTH", "Axis", "layer_axis", "named_axis", "place_axis"]


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: what it measures.
        low: its left or lower end; above ``high`` where values run downward.
        high: its other end.
        ticks: places and their texts; empty where the renderer is to choose round numbers, as many as fit.
        whole: whether round numbers are layers: whole, from 0.
        log: whether it is logarithmic; such an axis has its ticks given.
    """

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()
    whole: bool = False
    log: bool = False

    @property
    def named(self) -> bool:
        """Whether it has a name for each row, from the top down."""
        return self.low > self.high


DEPTH = Axis(
    "depth (layer / number of layers)", 0, 1, ticks=tuple((place / 4, f"{25 * place} %") for place in range(5))
)
"""The axis on which models of different depth stand side by side."""


def layer_axis(num_layers: int, *, room: float = 0.0) -> Axis:
    """Return an axis of layers, with ``room`` at both ends."""
    return Axis("layer", -room, max(num_layers, 1) + room, whole=True)


def named_axis(names: Sequence[str]) -> Axis:
    """Return an axis with a row for each name, the first at the top."""
    return Axis("", len(names) - 0.5, -0.5, ticks=tuple(enumerate(names)))


def place_axis(label: str, names: Sequence[object], most: int = 6) -> Axis:
    """Return an axis with a place for each name, ``most`` of which have it written: evenly spaced, the last among them.

    Where every layer from 0 on has a place, they are round numbers instead.

    Example:
        >>> place_axis("layer", [0, 4, 8, 12], most=2).ticks
        ((0, '0'), (3, '12'))
        >>> [text for _, text in place_axis("layer", range(31), most=9).ticks]
        ['0', '5', '10', '15', '20', '25', '30']
    """
    every = list(names) == list(range(len(names)))
    places = layer_ticks(len(names) - 1, most) if every else thinned(len(names), most)
    ticks = tuple((place, str(names[place])) for place in places)
    return Axis(label, -0.5, len(names) - 0.5, ticks)
