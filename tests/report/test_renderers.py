"""Both renderers draw the same numbers from one description: what SVG shows is read back and compared with matplotlib."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import polars as pl
import pytest
from matplotlib.colors import to_hex

from midlayer_encoders.frame import histories, summary
from midlayer_encoders.report.axes import Axis, layer_axis, named_axis
from midlayer_encoders.report.charts import Bars, Chart, Dots, Level, Line, Mark, Panel, Part, Rule, Scale, Word
from midlayer_encoders.report.comparisons import DIFFERENCES, SIMILARITY, differences_chart, similarity_chart
from midlayer_encoders.report.matplotlib_figures import draw
from midlayer_encoders.report.metrics import metrics_chart
from midlayer_encoders.report.page_figures import figure_html, strips_html
from midlayer_encoders.report.probes import probes_chart
from midlayer_encoders.report.scores import average_panel, losses_panel, tasks_chart
from midlayer_encoders.report.selections import selection_chart
from midlayer_encoders.report.steps import change_chart, curves_chart, heat_chart
from midlayer_encoders.report.style import LIGHT, SERIES, ordered_colors
from midlayer_encoders.report.svg import PANEL, WIDE, Size, panel_svg, rows_size
from tests.report.made_frames import full_frame, metrics_frame, rows_frame, scores_frame

FLOOR = 24  # pixels below the axis of layers
TABLE = pl.DataFrame({"layer": [0, 1, 2], "accuracy": [0.3, 0.6, 0.4], "low": [0.2, 0.5, 0.3], "high": [0.4, 0.7, 0.5]})


def history() -> pl.DataFrame:
    return rows_frame(
        [
            ("m", f"step{step}", layer, layer / 3, "metric", "t", name, math.nan if step == layer == 1 else step**0.5 * layer + 1)
            for name in ("lidar", "dime")
            for step in (1, 8, 64)
            for layer in range(4)
        ]
    )  # fmt: skip


def differences() -> pl.DataFrame:
    rows = [
        ("a", model, k, k, k / 3, "t", "lidar", k - s, k - s - 0.5, k - s + 1)
        for s, model in enumerate("bc")
        for k in range(4)
    ]
    return pl.DataFrame(rows, schema=DIFFERENCES, orient="row")


def similarity() -> pl.DataFrame:
    rows = [("a", "b", j, k, 1 / (1 + abs(j - k))) for j in range(3) for k in range(4) if (j, k) != (2, 0)]
    return pl.DataFrame(rows, schema=SIMILARITY, orient="row")


CHARTS = {
    "average": lambda: Chart((average_panel(summary(scores_frame(6)), {}),)),
    "tasks": lambda: tasks_chart(
        summary(scores_frame(6)), {"TF-IDF": {"DocstringSTS": 0.9}, "MiniLM": {"DocstringSTS": 0.8}}
    ),
    "metrics": lambda: metrics_chart(metrics_frame(6, names=["lidar", "dime"], datasets=list("abcdefg")), chosen=3),
    "depths": lambda: metrics_chart(pl.concat([metrics_frame(n, names=["lidar"], model=f"m{n}") for n in (6, 24)])),
    "differences": lambda: differences_chart(differences()),
    "curves": lambda: curves_chart(histories(history())),
    "change": lambda: change_chart(history(), within=0.1),
    "probes": lambda: probes_chart({"a": TABLE, "b": TABLE.reverse()}, num_layers=2, chance=0.25),
    "selection": lambda: selection_chart(full_frame(), layer=3, rule="x", choices={"x": 3, "y": 6}, num_layers=30),
}
MAPS = {
    "losses": lambda: Chart((losses_panel(summary(scores_frame(6).slice(1))),)),
    "steps": lambda: heat_chart(histories(history())),
    "similarity": lambda: similarity_chart(similarity()),
}


class Read:
    """Positions in an SVG as values again, by the ends of the panel's axes."""

    def __init__(self, panel: Panel, size: Size = PANEL) -> None:
        self.panel, self.size = panel, rows_size(panel) if panel.y.named else size
        self.root = ElementTree.fromstring(panel_svg(panel, self.size))

    def x(self, position: float | str) -> float:
        share = (float(position) - self.size.left) / (self.size.width - self.size.left - self.size.right)
        low, high = self.panel.x.low, self.panel.x.high
        return low * (high / low) ** share if self.panel.x.log else low + share * (high - low)

    def y(self, position: float | str) -> float:
        floor = self.size.height - FLOOR
        share = (floor - float(position)) / (floor - self.size.top)
        return self.panel.y.low + share * (self.panel.y.high - self.panel.y.low)

    def near(self, value: float, axis: Axis) -> object:
        """Return a value to compare with: positions have a digit after the point."""
        return pytest.approx(value, abs=abs(axis.high - axis.low) / 500)

    def points(self, group: ElementTree.Element) -> list[tuple[float, float]]:
        return [(self.x(one.attrib["cx"]), self.y(one.attrib["cy"])) for one in group.iter("circle")]

    def groups(self, name: str) -> list[ElementTree.Element]:
        return [one for one in self.root.iter() if one.get("class", "").split(" ")[0] == name]

    def same(self, found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
        axes = self.panel.x, self.panel.y
        assert found == [tuple(self.near(v, axis) for v, axis in zip(point, axes, strict=True)) for point in expected]


@pytest.mark.parametrize("name", CHARTS)
def test_lines_have_the_same_points_in_both(name: str) -> None:
    chart = CHARTS[name]()
    figure = draw(chart)
    for panel, axes in zip(chart.panels, figure.axes, strict=False):
        read = Read(panel)
        curves = [
            one
            for one in axes.lines
            if one.get_marker() == "o" and one.get_linestyle() != "None" and len(one.get_xdata()) > 1
        ]
        groups = read.groups("line")
        assert len(groups) == len(curves) == len(panel.lines)
        for group, curve, line in zip(groups, curves, panel.lines, strict=True):
            drawn = [(x, y) for x, y in zip(curve.get_xdata(), curve.get_ydata(), strict=True) if math.isfinite(y)]
            read.same(read.points(group), drawn)
            assert drawn == [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
            colors = ordered_colors(panel.ordered) if panel.ordered else SERIES
            assert to_hex(curve.get_color()) == colors[line.style % len(colors)]
            assert group.attrib["class"] == f"line s{line.style}"
        assert axes.get_ylim() == (panel.y.low, panel.y.high)


@pytest.mark.parametrize("name", MAPS)
def test_maps_have_the_same_cells_in_both(name: str) -> None:
    chart = MAPS[name]()
    figure = draw(chart)
    for panel, axes in zip(chart.panels, figure.axes, strict=False):
        cells, shown = panel.cells, axes.images[0].get_array()
        assert cells is not None
        assert shown is not None
        text = strips_html(panel) if panel.y.named else panel_svg(panel, PANEL)
        by_tip = {
            one[0].text: one
            for one in ElementTree.fromstring(f"<div>{text}</div>").iter()
            if len(one) and one[0].tag == "title"
        }
        assert len(by_tip) == shown.size
        for row, tips in enumerate(cells.tips):
            for column, tip in enumerate(tips):
                gap = bool(shown.mask[row, column]) if shown.mask.ndim else False
                assert (by_tip[tip].tag == "path") is gap
                if not gap:
                    strength = (axes.images[0].norm(shown[row, column])).clip(0, 1)
                    strength = 1 - strength if cells.scale.falling else strength
                    assert float(by_tip[tip].attrib["fill-opacity"]) == pytest.approx(0.06 + 0.94 * strength, abs=0.006)
        dark = 3 - axes.images[0].to_rgba(shown)[..., :3].sum(axis=-1)
        known = [
            (float(by_tip[tip].attrib["fill-opacity"]), dark[row, column])
            for row, tips in enumerate(cells.tips)
            for column, tip in enumerate(tips)
            if by_tip[tip].tag == "rect"
        ]
        strongest, faintest = max(known), min(known)
        assert strongest[0] > faintest[0] + 0.5
        assert strongest[1] > faintest[1] + 1  # the strong color is the dark one
        peaks = {cells.tips[row][column] for row, column in enumerate(cells.peaks)}
        assert {tip for tip, one in by_tip.items() if one.get("class") == "peak"} == peaks
        rings = axes.collections[0].get_offsets().tolist() if cells.peaks else []
        assert rings == [[column, row] for row, column in enumerate(cells.peaks)]


def test_bands_have_the_same_ends_in_both() -> None:
    panel = differences_chart(differences()).panels[0]
    axes, read = draw(Chart((panel,))).axes[0], Read(panel)
    for band, shade in zip(read.groups("band"), axes.collections, strict=True):
        corners = [tuple(map(float, corner.split())) for corner in band.attrib["d"].strip("MZ").split("L")]
        drawn = {(round(x, 3), round(y, 3)) for x, y in shade.get_paths()[0].vertices.tolist()}
        for x, y in corners:
            assert min(abs(read.x(x) - a) + abs(read.y(y) - b) for a, b in drawn) < 0.05
        assert len(corners) == 8


def every_part() -> Panel:
    parts: tuple[Part, ...] = (
        Rule(1, "chosen"),
        Rule(2),
        Level(2.5, "a level", "level"),
        Bars((0, 2), (1.5, 3.0), 0.0, ("bar 0", "bar 2")),
        Dots((0, 1), (1.0, 2.0), "disc", "discs", 1, ("p", "q"), ((-0.2, 0.4), (0.5, 1.5))),
        Dots((2,), (0.5,), "ring"),
        Dots((3,), (3.5,), "dot"),
        Dots((0.5, 1.5), (3.0, 3.0), "tick", style=2),
        Mark("best", 1, 3.5, "layer 1: 3.5"),
        Mark("last", 3, 1.0, "last: 1.0"),
        Word(1, 0.5, "beside", bold=True),
    )
    return Panel("all", layer_axis(3), Axis("", 0, 4), parts, gain="+2.5")


def test_points_marks_bars_and_levels_are_in_the_same_places() -> None:
    panel = every_part()
    axes, read = draw(Chart((panel,), head=True)).axes[0], Read(panel, WIDE)
    groups = read.groups("dots")
    drawn = [one for one in axes.lines if one.get_linestyle() == "None"]
    assert len(groups) == 4
    for group, shown in zip(groups[:3], drawn[:3], strict=True):
        read.same(read.points(group), list(zip(shown.get_xdata(), shown.get_ydata(), strict=True)))
    spans = groups[0][0].attrib["d"].split("M")[1:]
    (bars,) = axes.collections
    ends = [[read.x(one.split()[0]), read.x(one.split("H")[1])] for one in spans]
    assert ends == [[read.near(x, panel.x) for x, _ in segment] for segment in bars.get_segments()]
    assert [[x for x, _ in segment] for segment in bars.get_segments()] == [[-0.2, 0.4], [0.5, 1.5]]
    ticks = groups[3][0].attrib["d"].split("M")[1:]
    read.same(
        [(read.x(one.split()[0]), read.y(float(one.split()[1].split("v")[0]) + 6)) for one in ticks],
        [(0.5, 3.0), (1.5, 3.0)],
    )
    assert list(drawn[3].get_xdata()) == [0.5, 1.5]
    (best,), (last,) = read.groups("best"), read.groups("last")
    read.same([(read.x(best.attrib["cx"]), read.y(best.attrib["cy"]))], [(1, 3.5)])
    side = float(last.attrib["width"]) / 2
    read.same([(read.x(float(last.attrib["x"]) + side), read.y(float(last.attrib["y"]) + side))], [(3, 1.0)])
    marks = {
        (one.get_xdata()[0], one.get_ydata()[0]): to_hex(one.get_color())
        for one in axes.lines
        if len(one.get_xdata()) == 1
    }
    assert marks[1, 3.5] == LIGHT["best"]
    assert marks[3, 1.0] == "#ffffff"
    tops = [read.y(bar.attrib["d"].split("V")[1].split("H")[0]) for bar in read.groups("bar")]
    assert tops == [read.near(bar.get_y() + bar.get_height(), panel.y) for bar in axes.patches]
    (level,) = read.groups("level")
    assert read.y(level.attrib["d"].split()[1].split("H")[0]) == read.near(2.5, panel.y)
    assert [one.get_ydata()[0] for one in axes.lines if one.get_label() == "level"] == [2.5]
    words = {text.get_text() for text in axes.texts}
    assert words == {"layer 1: 3.5", "last: 1.0", "+2.5", "beside"}
    assert words <= {text.text for text in read.root.iter("text")}


def test_a_logarithmic_axis_and_rows_with_names() -> None:
    dots = Dots((0.1, 1.0, 100.0), (0, 1, 1))
    panel = Panel("log", Axis("ratio", 0.1, 100, log=True), named_axis(["first\nrow", "second"]), (dots,))
    axes, read = draw(Chart((panel,))).axes[0], Read(panel)
    assert axes.get_xscale() == "log"
    found = read.points(read.groups("dots")[0])
    assert [math.log(x) for x, _ in found] == pytest.approx([math.log(x) for x in dots.x], abs=0.01)
    assert [y for _, y in found] == pytest.approx([0, 1, 1], abs=0.01)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["first\nrow", "second"]
    assert [text.text for text in read.root.iter("text")][:3] == ["first", "row", "second"]


def test_keys_and_scales_are_in_both() -> None:
    chart = metrics_chart(metrics_frame(6, names=["lidar", "dime"], datasets=["a & b", "c"]))
    texts = [text.get_text() for text in draw(chart).legends[0].get_texts()]
    items = ElementTree.fromstring(f"<div>{figure_html(chart)}</div>".replace("<wbr>", "")).iter("li")
    assert ["".join(item.itertext()) for item in items] == texts == ["a & b", "c"]
    maps = similarity_chart(similarity())
    assert [axes.get_ylabel() for axes in draw(maps).axes] == ["layer", "CKA"]
    assert figure_html(maps).count('class="scale"') == 1
    assert '<div class="scale"><span>CKA 0</span>' in figure_html(maps)
    own = heat_chart(histories(history()))
    assert len(draw(own).axes) == 4
    assert figure_html(own).count("(faint) to") == 2


def test_rows_are_named_once_in_a_figure_and_in_every_panel_of_the_page() -> None:
    panel = Panel("p", Axis("", 0, 1), named_axis(["dime", "lidar"]), (Dots((0.5,), (0,)),))
    chart = Chart((panel, panel))
    first, second = (axes.yaxis.get_tick_params()["labelleft"] for axes in draw(chart).axes)
    assert (first, second) == (True, False)
    assert figure_html(chart).count(">dime<") == 2


def test_a_panel_without_parts_is_a_title_alone() -> None:
    axes = draw(Chart((Panel("nothing", layer_axis(2), Axis("", 0, 1), ()),), head=True)).axes[0]
    assert not axes.axison
    assert axes.get_title(loc="left") == "nothing"


def test_values_beyond_a_scale_have_its_color() -> None:
    rising, falling = Scale(0, 2, ("0", "2")), Scale(0, 2, ("0", "2"), falling=True)
    assert [rising.strength(value) for value in (-1, 0, 1, 2, 9)] == [0, 0, 0.5, 1, 1]
    assert [falling.strength(value) for value in (-1, 0, 1, 2, 9)] == [1, 1, 0.5, 0, 0]
    assert Scale(3, 3, ("3", "3")).strength(3) == 0.5


def test_what_is_no_map_cannot_be_drawn_as_strips() -> None:
    line = Line((0, 1), (1.0, 2.0))
    with pytest.raises(TypeError, match="must hold cells to be drawn as strips, but 'a line' has none"):
        strips_html(Panel("a line", layer_axis(1), Axis("", 0, 3), (line,)))
    with pytest.raises(TypeError, match="but 'none' has none"):
        strips_html(Panel("none", layer_axis(1), Axis("", 0, 3), ()))
