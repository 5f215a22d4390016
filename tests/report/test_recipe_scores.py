"""Recipes beside each other and beside baselines: the table, the tile, the curves and what the page says of them."""

from __future__ import annotations

import re
from html import unescape

from midlayer_encoders.frame.summaries import Summary, summary
from midlayer_encoders.report import report_html
from midlayer_encoders.report.layer_charts import plot_recipe_curves, recipe_rows
from tests.report.drawn_artists import artists
from tests.report.made_frames import rows_frame

SCORES = {
    "plain": {"A": {0: 0.2, 1: 0.5, 2: 0.4}, "B": {0: 0.3, 1: 0.4, 2: 0.3}},
    "one-word": {"A": {1: 0.3, 2: 0.7}, "B": {1: 0.3, 2: 0.6}},
}
BASELINES = {"TF-IDF": {"A": 0.45, "B": 0.35}, "MiniLM": {"A": 0.8, "B": 0.7}, "elsewhere": {"A": 0.1}}
FRAMES = {
    name: rows_frame(
        [("m", "main", k, k / 2, "score", task, "f1", value) for task, by in tasks.items() for k, value in by.items()]
    )
    for name, tasks in SCORES.items()
}
FOUND: dict[str, Summary] = {name: summary(frame) for name, frame in FRAMES.items()}


def test_baselines_stand_below_the_recipes() -> None:
    assert recipe_rows(FOUND, BASELINES) == [
        ["recipe", "best layer", "average", "gain over plain", "A", "B"],
        ["plain", "1", "45.0", "0.0", "50.0", "40.0"],
        ["one-word", "2", "65.0", "+20.0", "70.0", "60.0"],
        ["TF-IDF", "", "40.0", "−5.0", "45.0", "35.0"],
        ["MiniLM", "", "75.0", "+30.0", "80.0", "70.0"],
        ["elsewhere", "", "", "", "10.0", ""],
    ]


def test_the_curves_come_first_in_the_key_and_each_baseline_has_a_level() -> None:
    figure = plot_recipe_curves(FOUND, BASELINES)
    (axes,) = figure.axes
    assert [line.get_label() for line in artists(axes, "line")] == ["plain", "one-word"]
    levels = [(level.get_ydata()[0], level.get_label()) for level in artists(axes, "level")]
    assert levels == [(40.0, "TF-IDF 40.0"), (75.0, "MiniLM 75.0")]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["plain", "one-word", "TF-IDF 40.0", "MiniLM 75.0"]
    assert axes.get_label().endswith("; TF-IDF 40.0; MiniLM 75.0")


def test_the_page_says_which_recipe_won_and_what_was_not_scored() -> None:
    page = report_html(FRAMES["one-word"], title="T", how={}, baselines=BASELINES, recipes=FOUND)
    words = unescape(re.sub("<.*?>", " ", page))
    assert "Gray: not scored." in words  # one-word has no score at layer 0
    assert "+20.0 points over plain at its best layer" in words
    tiles = re.findall(r"<dt>(.*?)</dt>", page)
    assert tiles[:2] == ["Best recipe", "Best layer"]
    alone = report_html(FRAMES["plain"], title="T", how={}, recipes={"plain": FOUND["plain"]})
    assert "Gray: not scored." not in alone
    assert '<dt>Best recipe</dt><dd class="big">plain</dd><dd class="soft">of 1</dd>' in alone
