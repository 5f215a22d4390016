"""What an axis of a panel shows: layers, relative depth, values, names of rows, or places in a list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from midlayer_encoders.frame.steps import thinned
from midlayer_encoders.report.ticks import amount, layer_ticks, padded

__all__ = ["DEPTH", "Axis", "amount_axis", "layer_axis", "named_axis", "place_axis"]


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


_MOST_AMOUNTS = 6  # ticks
_SIZES_APART = 5  # times: on a linear axis the small ones would meet at its end

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


def amount_axis(label: str, amounts: Sequence[float]) -> Axis:
    """Return an axis of positive amounts, logarithmic where they are of different sizes.

    Example:
        >>> [text for _, text in amount_axis("parameters", [22e6, 1.1e9]).ticks]
        ['20M', '50M', '100M', '200M', '500M', '1B']
        >>> amount_axis("bytes", [1024, 1536]).log
        False
    """
    low, high = min(amounts), max(amounts)
    if high < _SIZES_APART * low:
        return Axis(label, *padded([low, high]))
    ends = low / 1.2, high * 1.2
    powers = range(math.floor(math.log10(ends[0])), math.ceil(math.log10(ends[1])) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5)):  # the finest of which there is room for
        more = [step * 10.0**power for power in powers for step in steps if ends[0] <= step * 10.0**power <= ends[1]]
        ticks = more if len(more) <= _MOST_AMOUNTS or not ticks else ticks
    return Axis(label, *ends, tuple((tick, amount(tick)) for tick in ticks), log=True)
