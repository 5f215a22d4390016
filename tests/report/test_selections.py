import polars as pl
from matplotlib.colors import to_hex

from midlayer_encoders.report.layer_charts import plot_selection
from midlayer_encoders.report.style import LIGHT
from tests.report.drawn_artists import artists, points, titles
from tests.report.made_frames import metrics_frame, rows_frame, scores_frame


def test_selection_is_marked_among_the_rules_and_in_every_panel() -> None:
    frame = pl.concat([metrics_frame(6, names=["lidar", "dime"]), scores_frame(6, tasks=1)])
    choices = {"last": 6, "min-dime": 4, "fixed-depth": 3}
    figure = plot_selection(frame, layer=4, rule="min-dime", choices=choices, num_layers=6)
    top, *panels = figure.axes
    assert titles(figure) == ["layer 4, by min-dime", "accuracy: LibraryClassification", "lidar", "dime"]
    assert [text.get_text() for text in top.get_yticklabels()] == list(choices)
    assert [points(mark) for mark in artists(top, "mark")] == [[(4, 1)]]
    assert [points(dot) for dot in artists(top, "dots")] == [[(6, 0)], [(3, 2)]]
    texts = [(text.get_text(), text.get_weight()) for text in top.texts]
    assert texts == [("6", "normal"), ("4", "bold"), ("3", "normal")]
    assert all(list(artists(axes, "rule")[0].get_xdata()) == [4, 4] for axes in figure.axes)
    assert list(artists(panels[1], "line")[0].get_ydata()) == frame.filter(name="lidar")["value"].to_list()


def test_selection_without_texts_shows_only_the_rules() -> None:
    figure = plot_selection(rows_frame([]), layer=3, rule="last", choices={"last": 3}, num_layers=3)
    assert len(figure.axes) == 1


def test_label_beside_the_chosen_layer_is_not_crossed_by_its_line() -> None:
    figure = plot_selection(rows_frame([]), layer=28, rule="auto", choices={"auto": 28, "few": 27}, num_layers=30)
    top = figure.axes[0]
    (rule,) = artists(top, "rule")
    for text in top.texts:
        patch = text.get_bbox_patch()
        assert patch is not None
        assert to_hex(patch.get_facecolor()) == LIGHT["page"]
        assert text.get_zorder() > rule.get_zorder()
