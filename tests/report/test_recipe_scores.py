"""Recipes and baselines: the table, the tile, the curves and the text of the page."""

import re
from html import unescape

from midlayer_encoders.frame.summaries import Summary, summary
from midlayer_encoders.report import report_html
from midlayer_encoders.report.layer_charts import plot_recipes, recipe_rows
from tests.report.drawn_artists import artists, points
from tests.report.made_frames import rows_frame

SCORES = {
    "plain": {"A": {0: 0.2, 1: 0.5, 2: 0.4}, "B": {0: 0.3, 1: 0.4, 2: 0.3}},
    "one-word": {"A": {1: 0.3, 2: 0.7}, "B": {1: 0.3, 2: 0.6}},
}
BASELINES = {"TF-IDF": {"A": 0.45, "B": 0.35}, "MiniLM": {"A": 0.8, "B": 0.7}, "elsewhere": {"A": 0.1}}
FRAMES = {
    name: rows_frame(
        [
            ("m", "main", k, k / 2, "score", task, "f1", value)
            for task, scores in tasks.items()
            for k, value in scores.items()
        ]
    )
    for name, tasks in SCORES.items()
}
SUMMARIES: dict[str, Summary] = {name: summary(frame) for name, frame in FRAMES.items()}


def test_baselines_are_listed_below_the_recipes() -> None:
    assert recipe_rows(SUMMARIES, BASELINES) == [
        ["recipe", "best layer", "average", "gain over plain", "A", "B"],
        ["plain", "1", "45.0", "0.0", "50.0", "40.0"],
        ["one-word", "2", "65.0", "+20.0", "70.0", "60.0"],
        ["TF-IDF", "", "40.0", "−5.0", "45.0", "35.0"],
        ["MiniLM", "", "75.0", "+30.0", "80.0", "70.0"],
        ["elsewhere", "", "–", "–", "10.0", "–"],
    ]


def test_curves_come_first_in_the_legend_and_each_baseline_has_a_level() -> None:
    figure = plot_recipes(SUMMARIES, BASELINES)
    (axes,) = figure.axes
    assert [line.get_label() for line in artists(axes, "line")] == ["plain", "one-word"]
    levels = [(level.get_ydata()[0], level.get_label()) for level in artists(axes, "level")]
    assert levels == [(40.0, "TF-IDF 40.0"), (75.0, "MiniLM 75.0")]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["plain", "one-word", "TF-IDF 40.0", "MiniLM 75.0"]


def test_page_names_the_best_recipe_and_the_missing_scores() -> None:
    page = report_html(FRAMES["one-word"], title="T", how={}, baselines=BASELINES, recipes=SUMMARIES)
    page_text = unescape(re.sub("<.*?>", " ", page))
    assert "one-word at layer 2 of 2 scores 65.0: 20.0 points more than the best layer of the plain text" in page_text
    assert re.findall("<h2>(.*?)</h2>", page)[:2] == ["Recipes and layers", "Score by depth"]


def test_best_layer_of_the_best_recipe_is_marked() -> None:
    """The averages are 25, 45 and 35 for plain, and 30 and 65 for one-word."""
    (curves,) = plot_recipes(SUMMARIES, BASELINES).axes
    (mark,) = artists(curves, "mark")
    assert points(mark) == [(2, 65)]
    assert curves.get_title(loc="left") == "average of 2 tasks"


def test_page_of_recipes_without_plain_compares_with_none() -> None:
    page = report_html(FRAMES["one-word"], title="T", how={}, recipes={"one-word": SUMMARIES["one-word"]})
    assert "one-word at layer 2 of 2 scores 65.0, 0.0 points more than at its last layer." in page
