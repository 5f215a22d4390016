from __future__ import annotations

import re
from pathlib import Path

import pytest

from midlayer_encoders.report import style

CSS = Path(style.__file__).with_name("page.css").read_text(encoding="utf-8")
THEMES = re.findall(r":root \{([^}]*--page[^}]*)\}", CSS)


def luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(color: str, other_color: str) -> float:
    """Return the WCAG 2 contrast of two colors."""
    high, low = sorted((luminance(color), luminance(other_color)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_text_and_lines_have_contrast_in_both_themes(theme: str) -> None:
    colors = dict(re.findall(r"--(\w+): (#\w{6});", theme))
    for text in ("ink", "soft", "best"):
        for background in ("page", "card"):
            assert contrast(colors[text], colors[background]) >= 4.5, (text, background)
    assert contrast(colors["best"], colors["row"]) >= 4.5
    assert contrast(colors["ink"], colors["code"]) >= 4.5


def test_curves_have_contrast_and_charts_the_colors_of_the_page() -> None:
    assert min(contrast(color, style.LIGHT["page"]) for color in style.SERIES) >= 3.0
    assert style.LIGHT.items() <= dict(re.findall(r"--(\w+): (#\w{6});", THEMES[0])).items()


def test_there_are_two_themes_and_print_is_light() -> None:
    assert len(THEMES) == 2
    assert "@media screen and (prefers-color-scheme: dark)" in CSS
