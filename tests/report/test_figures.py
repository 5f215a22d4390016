import math
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from PIL import Image

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.summaries import summary
from midlayer_encoders.report import plot_metrics, plot_scores, write_figure
from midlayer_encoders.report.layer_charts import plot_summary
from tests.report.drawn_artists import artists
from tests.report.made_frames import METRICS, metrics_frame, rows_frame, scores_frame


@pytest.mark.parametrize("names", [("curvature",), ("curvature", "lidar"), tuple(METRICS)])
def test_each_metric_has_a_panel_with_its_values(names: tuple[str, ...]) -> None:
    frame = metrics_frame(6, names=names)
    figure = plot_metrics(frame)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(names)
    for axes, name in zip(figure.axes, names, strict=True):
        assert list(axes.lines[0].get_ydata()) == frame.filter(pl.col("name") == name)["value"].to_list()
        assert [tick for tick in axes.get_xticks() if 0 <= tick <= 6] == [0, 1, 2, 3, 4, 5, 6]


def test_series_have_distinct_styles_and_a_legend() -> None:
    figure = plot_metrics(metrics_frame(6, names=["lidar"], datasets=[f"texts {k}" for k in range(7)]))
    lines = figure.axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 7
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"texts {k}" for k in range(7)]


def test_models_of_different_depth_share_relative_depth() -> None:
    frames = [metrics_frame(depth, names=["lidar"], model=f"m{depth}") for depth in (6, 24)]
    axes = plot_metrics(pl.concat(frames)).axes[0]
    assert axes.get_xlabel() == "relative depth"
    assert [max(line.get_xdata()) for line in axes.lines] == [1.0, 1.0]
    embeddings = frames[0].filter(layer=0).with_columns(model=pl.lit("only its embeddings"))
    axes = plot_metrics(pl.concat([frames[0], embeddings])).axes[0]
    assert axes.get_xlabel() == "layer", "layer 0 alone does not tell the depth of a model"


def test_nonfinite_values_leave_a_gap(tmp_path: Path) -> None:
    rows = [("m", "r", k, k / 2, "metric", "t", "lidar", v) for k, v in enumerate([1.0, math.inf, 2.0])]
    figure = plot_metrics(rows_frame(rows))
    assert math.isnan(figure.axes[0].lines[0].get_ydata()[1])
    figure.savefig(tmp_path / "gap.png")


def test_scores_show_the_average_and_every_task() -> None:
    frame = scores_frame(12)
    scores, figure = summary(frame), plot_scores(frame)
    assert scores.average is not None
    assert list(figure.axes[0].lines[0].get_ydata()) == list(scores.average.points.values())
    assert [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes[1:]] == [
        task.name for task in scores.tasks
    ]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == [f"layer {scores.average.best_layer}: {scores.average.best:.1f}"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("frame", "title"),
    [
        (scores_frame(6, tasks=1, layers=[3]), "at 3"),
        (rows_frame([("m", "r", k, float(k), "score", "A", "f1", 0.1 + k) for k in (0, 1)]), "best 110.0 at 1"),
        (
            scores_frame(6).filter((pl.col("layer") == 1) ^ (pl.col("dataset") == "DocstringSTS")),
            "LibraryClassification",
        ),
    ],
)
def test_unusual_scores_are_drawn(frame: pl.DataFrame, title: str, tmp_path: Path) -> None:
    figure = plot_scores(frame)
    assert title in figure.axes[0].get_title(loc="left").replace("\N{NO-BREAK SPACE}", " ")
    figure.savefig(tmp_path / "scores.png", dpi=50)


def test_baseline_is_a_level_in_the_panel_of_its_task() -> None:
    scores = summary(scores_frame(6, tasks=2))
    baselines = {"TF-IDF": {"SubmoduleClustering": 0.7}, "MiniLM": {"SubmoduleClustering": 0.8}}
    _, first, second = plot_summary(scores, baselines).axes
    assert not artists(first, "level")
    levels = [(level.get_ydata()[0], level.get_label()) for level in artists(second, "level")]
    assert levels == [(70.0, "TF-IDF"), (80.0, "MiniLM")]
    tfidf = {"SubmoduleClustering": 0.7, "LibraryClassification": 0.5}
    average_axes = plot_summary(scores, {"TF-IDF": tfidf, "MiniLM": {"SubmoduleClustering": 0.8}}).axes[0]
    assert [level.get_ydata()[0] for level in artists(average_axes, "level")] == [60.0]


def test_metrics_figure_is_a_png(tmp_path: Path) -> None:
    path = write_figure(plot_metrics(metrics_frame(6, names=["lidar", "dime"])), tmp_path / "new" / "metrics.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width > 600


def test_frames_without_the_needed_rows_are_refused() -> None:
    with pytest.raises(OptionError, match="rows of kind 'metric' to plot metrics, but got none"):
        plot_metrics(scores_frame(2))
    with pytest.raises(OptionError, match="rows of kind 'score' to plot scores, but got none"):
        plot_scores(metrics_frame(2))


@pytest.mark.long
def test_import_avoids_matplotlib_and_plotting_avoids_pyplot() -> None:
    code = (
        "import sys, midlayer_encoders.report as report; assert 'matplotlib' not in sys.modules;"
        "from midlayer_encoders.frame import FRAME_SCHEMA;"
        "import polars as pl; rows = [('m', 'r', k, float(k), 'metric', 't', 'lidar', 1.0) for k in (0, 1)];"
        "report.plot_metrics(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient='row'));"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
