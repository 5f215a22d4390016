"""Colors and dashes of charts, and the CSS of pages."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

_COLORS = {
    "page": ("#ffffff", "#14171c"),
    "card": ("#f5f6f8", "#1e232a"),
    "ink": ("#1b1f24", "#e8eaed"),
    "soft": ("#57606a", "#a9b1bb"),
    "rule": ("#d5d9de", "#3a424d"),
    "accent": ("#0065a8", "#7cc4f5"),
    "best": ("#b54600", "#ff9a4d"),
    "code": ("#eef0f3", "#252b33"),
    "row": ("#fff3e6", "#3a2a1a"),
}
#: Colors of the light theme by role.
LIGHT = {name: light for name, (light, _) in _COLORS.items()}

_DARK = {name: dark for name, (_, dark) in _COLORS.items()}

#: Colors of curves in the light theme: after Okabe and Ito, darkened to a contrast of at least 3.
SERIES = ("#0072b2", "#d55e00", "#008060", "#b8518b", "#5a5a5a")

_SERIES_DARK = ("#62b8ee", "#ff9a4d", "#3fd0a4", "#ec9fcb", "#c8c8c8")

#: Dashes of curves that follow when the colors repeat.
DASHES = ("-", (0, (6, 3)), (0, (2, 3)), (0, (8, 3, 2, 3)))

#: Dashes of successive levels.
LEVEL_DASHES = ((0, (5, 3)), (0, (1.5, 2.5)), (0, (7, 2, 1.5, 2)))


@cache
def ordered_colors(count: int, *, dark: bool = False) -> tuple[str, ...]:
    """Return ``count`` colors from early to late that are visible on white, or on the dark page.

    Example:
        >>> ordered_colors(2)
        ('#440154', '#cae11f')
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    low, high = (0.3, 1.0) if dark else (0.0, 0.92)
    places = [low + (high - low) * place / max(count - 1, 1) for place in range(count)]
    return tuple(to_hex(colormaps["viridis"](place)) for place in places)


@cache
def css_colors(ordered: int = 0) -> Mapping[str, str]:
    """Return the CSS value for each color of a figure: a variable of the theme, or both colors of an ordered curve."""
    named = {color: f"var(--{name})" for name, color in LIGHT.items()}
    named |= {color: f"var(--s{style})" for style, color in enumerate(SERIES)}
    pairs = zip(ordered_colors(ordered), ordered_colors(ordered, dark=True), strict=True)
    return named | {light: f"light-dark({light}, {dark})" for light, dark in pairs}


@cache
def page_css() -> str:
    """Return the CSS of all pages: the variables of both themes and ``page.css``."""
    light = f":root {{ color-scheme: light dark; {_variables(LIGHT, SERIES)} }}\n"
    dark = f":root {{ {_variables(_DARK, _SERIES_DARK)} }}\n"
    rules = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return f"{light}@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n{rules}"


def _variables(colors: Mapping[str, str], series: Sequence[str]) -> str:
    variables = {**colors, **{f"s{style}": color for style, color in enumerate(series)}}
    return " ".join(f"--{name}: {color};" for name, color in variables.items())
