import polars as pl
import pytest

from benchmarks.paper.charts import plot_correlations
from midlayer_encoders.errors import OptionError
from tests.report.drawn_artists import artists, points, titles

ROWS = [
    ("m", "r", "average", "dime", "dcor", 0.5, 0.25, 0.7, None),
    ("m", "r", "A", "dime", "dcor", 0.6, 0.5, 0.8, None),
    ("m", "r", "average", "lidar", "dcor", 0.2, 0.75, None, None),
    ("n", "r", "average", "dime", "dcor", None, None, None, "is constant"),
    ("n", "r", "average", "lidar", "dcor", 0.9, 0.05, 0.8, None),
]
COLUMNS = ["model", "revision", "task", "metric", "statistic", "value", "p", "threshold", "note"]


def test_models_share_the_row_of_their_metric() -> None:
    frame = pl.DataFrame(ROWS, schema=COLUMNS, orient="row")
    (axes,) = plot_correlations(frame, statistics=["dcor"]).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["dime", "lidar"]
    single, first, _, second = artists(axes, "dots")
    assert points(single) == [(0.6, -0.175)]
    assert (first.get_label(), points(first)) == ("m", [(0.5, -0.175), (0.2, 0.825)])
    spans = axes.collections[0].get_segments()
    assert [[x for x, _ in span] for span in spans] == [[0, 0.7], [0, 0]]  # the second has too few layers
    assert (second.get_label(), points(second)) == ("n", [(0.9, 1.175)])
    (text,) = axes.texts
    assert (text.get_text(), text.get_position()) == ("undefined", (0, 0.175))
    low, high = axes.get_xlim()
    assert -0.1 < low < 0 < 1 < high < 1.1


def test_a_frame_without_correlations_is_refused() -> None:
    with pytest.raises(OptionError, match="must have correlations to plot, but got none"):
        plot_correlations(pl.DataFrame(schema=COLUMNS))


def test_revisions_of_a_model_and_statistics_with_signs_have_their_labels_and_axes() -> None:
    rows = [
        ("m", revision, "average", "prompt_entropy", statistic, -0.5, 0.25, 0.6, None)
        for revision in ("step1", "step2")
        for statistic in ("dcor", "spearman", "kendall", "signed_dcor")
    ]
    frame = pl.DataFrame(rows, schema=COLUMNS, orient="row")
    figure = plot_correlations(frame, statistics=["dcor", "spearman", "kendall", "signed_dcor"])
    assert titles(figure) == [
        "distance correlation",
        "Spearman's ρ",
        "Kendall's τ",
        "distance correlation, with Spearman's sign",
    ]
    assert [round(axes.get_xlim()[0], 2) for axes in figure.axes] == [-0.03, -1.06, -1.06, -1.06]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["m, step1", "m, step2"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["prompt entropy"]
    with pytest.raises(OptionError, match=r"`statistics` must be one of .*Did you mean 'spearman'"):
        plot_correlations(frame, statistics=["spearmen"])
