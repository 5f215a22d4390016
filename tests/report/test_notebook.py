"""Results in a notebook: a table with the numbers of the result, a figure inside the HTML, and escaped texts."""

import base64
import io
import pickle
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
from PIL import Image

from midlayer_encoders import board
from midlayer_encoders.frame.summaries import RESAMPLES_SCHEMA
from midlayer_encoders.selection import select
from midlayer_encoders.sweeping import SweepResult
from tests.report.made_frames import rows_frame
from tests.report.made_runs import make_sweep, score_rows

STRANGE = '<script>alert(1)</script> & "m"'
SCORES = {"STS": [0.2, 0.6, 0.5], "Own-0a1b2c3d": [0.4, 0.2, 0.5]}


class Cell(HTMLParser):
    """The parts of the HTML of a cell."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.images: list[Image.Image] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        assert not {"href", "srcset", "onclick", "onload"} & values.keys()
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "img":
            kind, _, content = str(values["src"]).partition(",")
            assert kind == "data:image/png;base64"
            self.images.append(Image.open(io.BytesIO(base64.b64decode(content))))

    def handle_data(self, data: str) -> None:
        if self.lasttag in ("td", "th"):
            self.rows[-1][-1] += data.strip()


def shown(result: object) -> Cell:
    cell = Cell(result._repr_html_())  # type: ignore[attr-defined]
    assert cell.tags <= {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "img"}
    return cell


def resampled(result: SweepResult, *factors: float) -> SweepResult:
    """Return a result with resamples in which every score is multiplied by a factor."""
    scores = result.scores.select("dataset", "layer", "value").iter_rows()
    rows = [(task, layer, [factor * value for factor in factors]) for task, layer, value in scores]
    return replace(result, resamples=pl.DataFrame(rows, schema=RESAMPLES_SCHEMA, orient="row"))


@pytest.mark.long
def test_sweep_shows_the_best_layer_of_each_task_with_its_interval(tmp_path: Path) -> None:
    result = resampled(make_sweep(tmp_path, SCORES, model=STRANGE), 0.6, 1.4)
    cell = shown(result)
    assert cell.rows == [
        ["task", "recipe", "best layer", "score", "last layer", "gain (95 % interval)"],
        ["average", "plain", "2 of 2", "50.0", "50.0", "0.0"],
        ["STS", "plain", "1 of 2", "60.0", "50.0", "+10.0 (+6.2 to +13.8)"],
        ["Own", "plain", "2 of 2", "50.0", "50.0", "0.0"],
    ]
    (image,) = cell.images
    assert image.size[0] > 500
    assert STRANGE not in result._repr_html_()
    assert len(result._repr_html_()) < 200_000
    unsure = resampled(make_sweep(tmp_path, {"STS": SCORES["STS"]}), -0.5, 1.5)
    assert [row[-1] for row in shown(unsure).rows[1:]] == ["+10.0 (−4.5 to +14.5), not separable"]
    assert repr(result).startswith("<SweepResult: Every layer of <script>")
    assert repr(result).endswith(f"tasks=['STS', 'Own'], folder={str(tmp_path)!r}>")


def test_recipes_are_compared_with_the_last_layer_of_the_plain_text(tmp_path: Path) -> None:
    echo = make_sweep(tmp_path / "echo", {"STS": [0.1, 0.4, 0.7], "Own-0a1b2c3d": [0.1, 0.2, 0.2]})
    result = SweepResult.of({"plain": make_sweep(tmp_path / "plain", SCORES), "echo": echo}, tmp_path)
    cell = shown(result)
    assert cell.rows[0][4] == "last layer of plain"
    assert [row[:5] for row in cell.rows[1:]] == [
        ["average", "plain", "2 of 2", "50.0", "50.0"],
        ["STS", "echo", "2 of 2", "70.0", "50.0"],
        ["Own", "plain", "2 of 2", "50.0", "50.0"],
    ]
    assert cell.rows[2][5] == "+20.0 (no interval)"
    assert cell.images


@pytest.mark.long
def test_result_without_scores_shows_the_reason(tmp_path: Path) -> None:
    failed = make_sweep(tmp_path, {}, failures={"STS12": "no <network>"})
    cell = shown(failed)
    assert (cell.rows, cell.images) == ([], [])
    assert "STS12 failed: no &lt;network&gt;" in failed._repr_html_()
    assert "The sweep had no tasks." in make_sweep(tmp_path, {})._repr_html_()
    rows = [row for row in score_rows(SCORES) if (row[5] == "STS") == (row[2] < 2)]
    partly = replace(make_sweep(tmp_path, SCORES), frame=rows_frame(rows))
    assert [row[0] for row in shown(partly).rows] == ["task", "STS", "Own"], "no layer has both, so no average"
    nothing_complete = SweepResult.of({"plain": partly}, tmp_path)
    assert [row[0] for row in shown(nothing_complete).rows] == ["task", "STS", "Own"]


@pytest.mark.long
def test_selection_shows_the_choices(tmp_path: Path) -> None:
    frame = rows_frame(score_rows({"STS": [0.1, 0.2, 0.5, 0.4, 0.3]}, STRANGE))
    selection = select(frame)
    cell = shown(selection)
    choices = {choice.rule: choice for choice in selection.choices}
    assert cell.rows[0] == ["rule", "layer", "reason"]
    assert {row[0]: row[1] for row in cell.rows[1:]} == {
        rule: "" if choice.layer is None else str(choice.layer) for rule, choice in choices.items()
    }
    assert cell.images


@pytest.mark.long
def test_figures_are_images_in_a_notebook_and_name_tasks_by_their_labels(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "plain", SCORES, baselines={"TF-IDF": {"STS": 0.1, "Own-0a1b2c3d": 0.2}})
    recipes = SweepResult.of({"plain": sweep, "echo": make_sweep(tmp_path / "echo", SCORES)}, tmp_path)
    selection = select(rows_frame(score_rows({"STS": [0.1, 0.2, 0.5, 0.3]})))
    for result in (sweep, recipes, selection, board(tmp_path / "plain")):
        figure = result.plot()
        assert Image.open(io.BytesIO(figure._repr_png_())).size[0] > 400  # type: ignore[attr-defined]
        assert pickle.loads(pickle.dumps(figure)).axes
        texts = [axes.get_title(loc="left") for axes in figure.axes]
        assert not any("0a1b2c3d" in text for text in texts), texts
    single = SweepResult.of({"plain": make_sweep(tmp_path / "own", {"Own-0a1b2c3d": [0.2, 0.3]})}, tmp_path)
    assert single.plot().axes[0].get_title(loc="left").startswith("Own")


@pytest.mark.parametrize("value", ["<b>", "a & b"])
def test_texts_are_escaped(value: str, tmp_path: Path) -> None:
    html = make_sweep(tmp_path, {f"task {value}": [0.2, 0.3]})._repr_html_()
    assert value not in html
    assert Cell(html).rows[1][0] == f"task {value}"
