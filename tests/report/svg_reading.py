"""Read positions in an SVG back as values, by its ticks."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np

_BASELINE = 4.37  # pixels from the center of a tick label to its baseline


def svgs(page: str, label: str) -> list[ElementTree.Element]:
    """Return the SVGs of a page whose label contains a text."""
    roots = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]
    return [root for root in roots if label in (root.get("aria-label") or "")]


def groups(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """Return the groups of a class that hold shapes."""
    return [group for group in root.iter("g") if group.get("class") == name and _has_shape(group)]


def _has_shape(group: ElementTree.Element) -> bool:
    return any(element.tag in ("path", "circle") for element in group.iter())


def segments(group: ElementTree.Element) -> list[tuple[float, float]]:
    """Return the corners of the first path of a group."""
    path = next(group.iter("path")).attrib["d"]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path)]


def assert_near(points: list[tuple[float, float]], expected: list[tuple[float, float]], *, x: float, y: float) -> None:
    actual, reference = np.array(points), np.array(expected)
    assert actual.shape == reference.shape
    assert np.abs(actual[:, 0] - reference[:, 0]).max() < x
    assert np.abs(actual[:, 1] - reference[:, 1]).max() < y


class Coordinates:
    """Positions in an SVG as values."""

    def __init__(self, root: ElementTree.Element) -> None:
        ticks = [text for text in root.iter("text") if text.get("class") == "tick" and self._is_number(text)]
        below = [text for text in ticks if "text-anchor: middle" in text.attrib["style"]]
        beside = [text for text in ticks if "text-anchor: end" in text.attrib["style"]]
        self._x = np.polyfit([float(text.attrib["x"]) for text in below], [self._number(text) for text in below], 1)
        heights = [float(text.attrib["y"]) - _BASELINE for text in beside]
        self._y = np.polyfit(heights, [self._number(text) for text in beside], 1)

    @staticmethod
    def _is_number(tick: ElementTree.Element) -> bool:
        return re.fullmatch(r"[−\d.]+", tick.text or "") is not None

    @staticmethod
    def _number(tick: ElementTree.Element) -> float:
        return float((tick.text or "").replace("−", "-"))

    def at(self, x: float, y: float) -> tuple[float, float]:
        return float(np.polyval(self._x, x)), float(np.polyval(self._y, y))

    def circles(self, group: ElementTree.Element) -> list[tuple[float, float]]:
        return [self.at(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in group.iter("circle")]
