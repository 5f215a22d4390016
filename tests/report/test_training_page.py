import math
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.steps import histories, layer_changes, settled, step_of
from midlayer_encoders.report import plot_steps_curves
from midlayer_encoders.report.training_page import steps_html, steps_words
from tests.report.made_frames import rows_frame

# Steps by layers: layer 0 never moves, layer 1 settles at step 4, layer 2 moves until the end and has a gap at step 4.
TABLE = {1: (1.0, 9.0, 0.0), 2: (1.1, 4.0, 3.0), 4: (1.0, 2.0, math.nan), 16: (1.0, 2.1, 10.0)}


def make_history(table: dict[int, tuple[float, ...]] = TABLE, *, name: str = "lidar", model: str = "m") -> pl.DataFrame:
    return rows_frame(
        [
            (model, f"step{step}", layer, layer / 2, "metric", "texts", name, value)
            for step, values in reversed(table.items())
            for layer, value in enumerate(values)
        ]
    )


@pytest.mark.parametrize(
    ("name", "step"),
    [("step0", 0), ("step143000", 143_000), ("checkpoint-500", 500), ("global_step12", 12), ("epoch=1-step=7", 7)],
)
def test_step_is_parsed_from_a_name(name: str, step: int) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize("name", ["main", "", "steps", "footstep5", "512", "v1.0", "step1234567890123456789"])
def test_name_without_a_step_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"must name a training step.*{name!r}"):
        step_of(name)


def test_history_is_ordered_by_step_with_gaps() -> None:
    (history,) = histories(make_history().filter(~((pl.col("revision") == "step2") & (pl.col("layer") == 0))))
    assert history.steps == (1, 2, 4, 16)
    expected = np.array([list(values) for values in TABLE.values()])
    expected[1, 0] = math.nan
    np.testing.assert_array_equal(history.values, expected)


def test_confirmed_scores_are_no_history() -> None:
    scores = make_history().with_columns(kind=pl.lit("score"))
    confirmed = scores.filter(layer=1).with_columns(kind=pl.lit("confirmed"), value=pl.lit(7.0))
    (history,) = histories(pl.concat([scores, confirmed]))
    np.testing.assert_array_equal(history.values, np.array(list(TABLE.values())))


def test_changes_are_between_measured_steps() -> None:
    changes = {row[:3]: row[3:] for row in layer_changes(make_history()).drop("dataset", "name").iter_rows()}
    expected = {}
    for layer in range(3):
        measured = [(step, values[layer]) for step, values in TABLE.items() if not math.isnan(values[layer])]
        for (before, low), (after, high) in zip(measured[:-1], measured[1:], strict=True):
            expected[layer, before, after] = (pytest.approx(abs(high - low)), pytest.approx(abs(high - low) / 10))
    assert changes == expected
    assert (2, 2, 16) in changes


@pytest.mark.parametrize(("within", "steps"), [(0.05, [1, 4, 16]), (0.25, [1, 2, 16]), (0.9, [1, 1, 2])])
def test_layer_is_settled_when_it_stays_near_its_final_value(within: float, steps: list[int]) -> None:
    settled_layers = settled(make_history(), within=within)
    assert settled_layers["step"].to_list() == steps
    assert settled_layers["final"].to_list() == [1.0, 2.1, 10.0]


def test_layer_that_moves_away_again_is_not_settled() -> None:
    table = {1: (0.0, 5.0), 2: (10.0, 5.0), 3: (0.0, 5.0)}
    assert settled(make_history(table))["step"].to_list() == [3, 1]


def test_constant_metric_has_zero_change() -> None:
    changes = layer_changes(make_history({1: (2.0, 2.0), 2: (2.0, 2.0)}))
    assert changes["relative"].to_list() == [0.0, 0.0]


def test_figures_hold_the_numbers(tmp_path: Path) -> None:
    combined = pl.concat([make_history(), make_history({1: (1.0, 1.0, 1.0), 2: (1.0, 1.0, 1.0)}, name="dime")])
    curves = plot_steps_curves(combined)
    lines = curves.axes[0].lines
    assert [list(line.get_ydata())[:2] for line in lines] == [list(values[:2]) for values in TABLE.values()]
    assert len({line.get_color() for line in lines}) == 4
    curves.savefig(tmp_path / "curves.png", dpi=40)


def test_changes_of_one_metric_are_separate_for_each_dataset() -> None:
    """From step 1 to 2, by layer: 4 and 0 of a range of 8 in the first dataset, 1 and 10 of 10 in the second."""
    first = make_history({1: (0.0, 8.0), 2: (4.0, 8.0)})
    second = make_history({1: (0.0, 0.0), 2: (1.0, 10.0)}).with_columns(dataset=pl.lit("other"))
    page = steps_html(pl.concat([first, second]), title="t", how={})
    table = re.search(r"<caption>Mean change between successive steps.*?</table>", page)
    assert table is not None
    assert re.findall('"col">(lidar.*?)</th>', re.sub("<wbr>", "", table[0])) == ["lidar (texts)", "lidar (other)"]
    assert re.findall(r"<td>(.*?)</td>", table[0]) == ["50.00", "10.00", "0", "100.0"]


def test_metric_that_is_never_finite_is_drawn_empty(tmp_path: Path) -> None:
    empty_history = make_history({1: (math.nan, math.inf), 2: (math.nan, math.nan)})
    assert layer_changes(empty_history).is_empty()
    assert settled(empty_history).is_empty()
    plot_steps_curves(empty_history).savefig(tmp_path / "empty.png", dpi=40)
    assert "The numbers" in steps_html(empty_history, title="t", how={})


def test_text_compares_thirds_of_the_depth() -> None:
    first, second = steps_words(make_history(), within=0.05)
    mean_changes = {
        layer: layer_changes(make_history()).filter(pl.col("layer") == layer)["relative"].mean() for layer in range(3)
    }
    shares = [f"{100 * mean_changes[layer]:.1f} %" for layer in range(3)]  # type: ignore[operator]
    assert all(share in first for share in shares)
    assert "from steps 1, 4 and 16 on" in second


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "wbr", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_complete_and_shows_every_step_and_gap() -> None:
    hostile = "<script>x</script>"
    page = steps_html(make_history(model=hostile), title=hostile, how={"seed": "0"}, notes=["step3 failed: no weights"])
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert not tags.seen.count("script")
    assert "step3 failed: no weights" in page
    settled_at = re.search(r"<caption>The step from which each layer is settled</caption>.*?</table>", page)
    assert settled_at is not None
    assert re.findall(r"<td>(.*?)</td>", settled_at[0]) == ["1", "4", "16"]
    assert "broken there: lidar" in page


def test_long_history_is_thinned_on_the_page_but_not_in_its_numbers() -> None:
    page = steps_html(make_history({step: (float(step), 1.0) for step in range(154)}), title="t", how={})
    assert "31 of 154 steps, each metric on its own scale" in page
    assert "<dt>Steps</dt><dd>0, 1, 2, " in page


@pytest.mark.parametrize(
    ("invalid_frame", "message"),
    [
        (make_history().clear(), "one model here, but got no row"),
        (pl.concat([make_history(), make_history(model="other")]), "one model here, but got m, other"),
        (make_history().with_columns(revision=pl.lit("main")).unique(["layer"]), "must name a training step"),
        (
            pl.concat(
                [
                    make_history(),
                    make_history().with_columns(revision=pl.col("revision").str.replace("step", "checkpoint-")),
                ]
            ),
            "one revision for each step",
        ),
    ],
)
def test_frames_without_a_history_are_refused(invalid_frame: pl.DataFrame, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plot_steps_curves(invalid_frame)


@pytest.mark.parametrize("within", [0.0, 1.0, -0.1])
def test_invalid_settling_share_is_refused(within: float) -> None:
    with pytest.raises(OptionError, match=r"`within` must be a share in \(0, 1\)"):
        settled(make_history(), within=within)


def test_page_states_the_share_within_which_layers_settle() -> None:
    """Within 30 % of the range, which is 10, layer 0 is settled from step 2 and layer 2 from step 4 on."""
    table = {1: (4.0, 0.0, 0.0), 2: (1.0, 0.0, 0.0), 4: (0.0, 0.0, 10.0), 8: (0.0, 0.0, 8.0)}
    frame = pl.concat([make_history(table), make_history(dict.fromkeys(table, (1.0, 1.0, 1.0)), name="dime")])
    words = steps_words(frame, within=0.3)
    assert words == [
        "Between successive steps a layer moves by 6.7 % of the metric's range in the first third of the depth, 0.0 % in "
        "the middle and 20.0 % in the last.",
        "Half of the curves of each third stay within 30 % of where they end from steps 2, 1 and 4 on, in the same order.",
    ]
    page = unescape(steps_html(frame, title="T", how={"Seed": "7"}, within=0.3)).replace("\N{NO-BREAK SPACE}", " ")
    assert f'<p class="verdict">{" ".join(words)}</p>' in page
    assert "stays within 30 % of the range of its final value" in page
    assert (
        dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page)).items()
        >= {"Model": "m", "Steps": "1, 2, 4, 8", "Seed": "7"}.items()
    )
    assert "m, 4 steps from 1 to 8" in page
    columns = {
        re.sub("<.*?>", "", caption): [re.findall("<td>(.*?)</td>", row)[0] for row in rows.split("<tr>")[2:]]
        for caption, rows in re.findall(r"<caption>(.*?)</caption>(.*?)</table>", page)
    }
    assert columns == {
        "Metrics by layer at step 8": ["0", "0", "8.000"],
        "Mean change between successive steps, % of the metric's range": ["13.33", "0", "40.00"],
        "The step from which each layer is settled": ["2", "1", "4"],
    }


def test_legend_names_at_most_ten_steps() -> None:
    figure = plot_steps_curves(make_history({step: (1.0, float(step)) for step in range(0, 24_000, 1000)}))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["step 2k", "step 5k", "step 8k", "step 11k", "step 14k", "step 17k", "step 20k", "step 23k"]
