"""Colors and dashes of charts."""

from functools import cache

#: Colors by role; `page.css` has the same, and those of the dark theme.
LIGHT = {"page": "#ffffff", "ink": "#1b1f24", "soft": "#57606a", "rule": "#d5d9de", "best": "#b54600"}

#: Colors of curves: after Okabe and Ito, darkened to a contrast of at least 3.
SERIES = ("#0072b2", "#d55e00", "#008060", "#b8518b", "#5a5a5a")

#: Dashes of curves that follow when the colors repeat.
DASHES = ("-", (0, (6, 3)), (0, (2, 3)), (0, (8, 3, 2, 3)))

#: Dashes of successive levels.
LEVEL_DASHES = ((0, (5, 3)), (0, (1.5, 2.5)), (0, (7, 2, 1.5, 2)))


@cache
def ordered_colors(count: int) -> tuple[str, ...]:
    """Return ``count`` colors from early to late that are visible on white.

    Example:
        >>> ordered_colors(2)
        ('#440154', '#cae11f')
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return tuple(to_hex(colormaps["viridis"](0.92 * place / max(count - 1, 1))) for place in range(count))
