"""What an axis of a panel shows: layers, relative depth, values, names of rows, or places in a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from midlayer_encoders.report.ticks import layer_ticks

__all__ = ["DEPTH", "Axis", "layer_axis", "layer_places", "named_axis", "place_axis"]


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        label: what it measures.
        low: its left or lower end; above ``high`` where values run downward.
        high: its other end.
        ticks: places and their texts; empty where the renderer is to choose round numbers, as many as fit.
        whole: whether round numbers are layers: whole, from 0.
        log: whether it is logarithmic.
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


def place_axis(label: str, count: int, names: Mapping[int, str]) -> Axis:
    """Return an axis of ``count`` places, some of which have a name."""
    return Axis(label, -0.5, count - 0.5, ticks=tuple(names.items()))


def layer_places(layers: Sequence[int], most: int = 6) -> dict[int, str]:
    """Return the places in ``layers`` that get a tick, with its text.

    Example:
        >>> layer_places([0, 4, 8, 12])
        {0: '0', 1: '4', 2: '8', 3: '12'}
    """
    shown = layer_ticks(layers[-1], most)
    return {place: str(layer) for place, layer in enumerate(layers) if layer in shown}
