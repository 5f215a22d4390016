import polars as pl
from matplotlib.colors import to_hex

from midlayer_encoders.report.layer_charts import plot_selection
from midlayer_encoders.report.style import LIGHT
from tests.report.drawn_artists import artists, titles
from tests.report.made_frames import metrics_frame, rows_frame, scores_frame


def test_selection_is_marked_among_the_rules_and_in_every_panel() -> None:
    frame = pl.concat([metrics_frame(6, names=["lidar", "dime"]), scores_frame(6, tasks=1)])
    choices = {"last": 6, "min-dime": 4, "fixed-depth": 3}
    figure = plot_selection(frame, layer=4, rule="min-dime", choices=choices, num_layers=6)
    top, *panels = figure.axes
    assert titles(figure) == ["layer 4, by min-dime", "accuracy: LibraryClassification", "lidar", "dime"]
    assert [text.get_text() for text in top.get_yticklabels()] == list(choices)
    assert [bar.get_width() for bar in top.patches] == [6, 4, 3]
    assert [to_hex(bar.get_facecolor()) == LIGHT["best"] for bar in top.patches] == [False, True, False]
    assert [text.get_text() for text in top.texts] == ["6", "4", "3"]
    assert all(list(artists(axes, "rule")[0].get_xdata()) == [4, 4] for axes in figure.axes)
    assert list(artists(panels[1], "line")[0].get_ydata()) == frame.filter(name="lidar")["value"].to_list()


def test_selection_without_texts_shows_only_the_rules() -> None:
    figure = plot_selection(rows_frame([]), layer=3, rule="last", choices={"last": 3}, num_layers=3)
    assert len(figure.axes) == 1
