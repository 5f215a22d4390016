from __future__ import annotations

import re

import pytest

from midlayer_encoders.report.style import SERIES, page_css

CSS = page_css()
THEMES = re.findall(r":root \{([^}]*--s4[^}]*)\}", CSS)


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
    for number in range(len(SERIES)):
        assert contrast(colors[f"s{number}"], colors["page"]) >= 3.0


def test_there_are_two_themes_and_print_is_light() -> None:
    assert len(THEMES) == 2
    assert "@media screen and (prefers-color-scheme: dark)" in CSS
