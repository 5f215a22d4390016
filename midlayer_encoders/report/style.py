"""How pictures and pages look: on a phone, on a desk, in the dark, on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

__all__ = ["DASHES", "LIGHT", "MISSING", "SERIES", "STYLES", "dashes_of", "ordered_colors", "ordered_rules", "page_css"]

LIGHT = {
    "page": "#ffffff", "card": "#f5f6f8", "ink": "#1b1f24", "soft": "#57606a", "rule": "#d5d9de", "accent": "#0065a8",
    "best": "#b54600", "heat": "#08519c", "code": "#eef0f3", "row": "#fff3e6",
}  # fmt: skip
"""Colors on white, by what they are for."""

_DARK = {
    "page": "#14171c", "card": "#1e232a", "ink": "#e8eaed", "soft": "#a9b1bb", "rule": "#3a424d", "accent": "#7cc4f5",
    "best": "#ff9a4d", "heat": "#6cb6f0", "code": "#252b33", "row": "#3a2a1a",
}  # fmt: skip

SERIES = ("#0072b2", "#d55e00", "#008060", "#b8518b", "#5a5a5a")
"""Colors of curves on white: after Okabe and Ito, safe for the color-blind, darkened to a contrast of 3 or more."""

_SERIES_DARK = ("#62b8ee", "#ff9a4d", "#3fd0a4", "#ec9fcb", "#c8c8c8")

DASHES = ("", "6 3", "2 3", "8 3 2 3")
"""Dashes of curves once the colors are used up, as SVG writes them."""

STYLES = len(SERIES) * len(DASHES)
"""How many curves can be told apart."""

MISSING = "#b9bec5"
"""The ground that shows through where a heat map has no value."""

_DARK_SCREEN = "@media screen and (prefers-color-scheme: dark)"


def dashes_of(style: int) -> str:
    """Return the dashes of a style number: colors change first, then dashes."""
    return DASHES[style // len(SERIES) % len(DASHES)]


@cache
def ordered_colors(count: int, *, dark: bool = False) -> tuple[str, ...]:
    """Return ``count`` colors in order, early to late; all of them show on white, or on a ``dark`` ground.

    Example:
        >>> ordered_colors(2)
        ('#440154', '#cae11f')
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    low, high = (0.3, 1.0) if dark else (0.0, 0.92)
    places = [low + (high - low) * place / max(count - 1, 1) for place in range(count)]
    return tuple(to_hex(colormaps["viridis"](place)) for place in places)


def ordered_rules(count: int) -> str:
    """Return the CSS of ``count`` curves in order: the figures' colors, and brighter ones on a dark ground."""
    light, dark = (
        "\n".join(f".ordered-{count} .s{k} {{ --c: {color}; --dash: none; }}" for k, color in enumerate(colors))
        for colors in (ordered_colors(count), ordered_colors(count, dark=True))
    )
    return f"{light}\n{_DARK_SCREEN} {{\n{dark}\n}}\n"


def _series_rules() -> str:
    return "\n".join(
        f".s{style} {{ --c: var(--s{style % len(SERIES)}); --dash: {dashes_of(style) or 'none'}; }}"
        for style in range(STYLES)
    )


def _variables(colors: Mapping[str, str], series: Sequence[str]) -> str:
    named = {**colors, **{f"s{style}": color for style, color in enumerate(series)}}
    return " ".join(f"--{name}: {color};" for name, color in named.items())


@cache
def page_css() -> str:
    """Return the CSS of every page: the colors of both themes, the rules of ``page.css``, and the styles of curves."""
    themes = (
        f":root {{ color-scheme: light dark; {_variables(LIGHT, SERIES)} }}\n"
        f"{_DARK_SCREEN} {{\n:root {{ {_variables(_DARK, _SERIES_DARK)} }}\n}}\n"
    )
    return themes + Path(__file__).with_name("page.css").read_text(encoding="utf-8") + _series_rules()
