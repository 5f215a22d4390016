"""Every number on a page, recomputed from the frame in plain Python."""

import random
import re
from html import unescape
from typing import Any

import polars as pl
import pytest

from midlayer_encoders.arguments import METRIC_ALIASES
from midlayer_encoders.frame import FRAME_SCHEMA
from midlayer_encoders.metrics import METRICS
from midlayer_encoders.report import plot_metrics, plot_scores, report_html
from midlayer_encoders.report.comparison_page import DIFFERENCES, comparisons_html
from midlayer_encoders.report.labels import METRIC_MEANINGS
from midlayer_encoders.report.sweep_page import confirmed_words
from midlayer_encoders.report.training_page import steps_html
from tests.report.made_frames import metrics_frame, rows_frame

DEPTH = 24


def make_frame(scores: dict[str, dict[int, float]], *, model: str = "m") -> pl.DataFrame:
    """Return a frame of scores of a model with 24 blocks, with shuffled rows."""
    rows = [
        (model, "main", layer, layer / DEPTH, "score", task, f"measure of {task}", value)
        for task, values in scores.items()
        for layer, value in values.items()
    ]
    first = [next(row for row in rows if row[5] == task) for task in scores]  # tasks stay in their order
    rest = [row for row in rows if row not in first]
    random.Random(4).shuffle(rest)
    return rows_frame([*first, *rest])


def table_cells(page: str, caption: str = "Points by layer") -> list[list[str]]:
    """Return the cells of the first table with the caption, heading first."""
    table = re.search(rf"<table><caption>{caption}.*?</table>", page)
    assert table is not None
    rows = re.findall(r"<tr.*?</tr>", table[0])
    return [
        [unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows
    ]


def format_number(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


CASES: dict[str, dict[str, dict[int, float]]] = {
    "some layers": {"A": {0: 0.31, 6: 0.52, 12: 0.47, 24: 0.4}, "B": {0: 0.1, 6: 0.2, 12: 0.7, 24: 0.15}},
    "a task on some layers": {"A": {0: 0.31, 6: 0.99, 12: 0.47, 24: 0.4}, "B": {0: 0.1, 12: 0.7, 24: 0.95}},
    "ties": {"A": {0: 0.5, 6: 0.5, 24: 0.25}, "B": {0: 0.25, 6: 0.25, 24: 0.5}, "C": {0: 0.0, 6: 0.0, 24: 0.0}},
    "the last is best": {"A": {3: 0.2, 9: 0.4, 21: 0.6}},
    "below zero": {"A": {0: -0.3, 8: -0.1, 24: -0.2}, "B": {0: -0.2, 8: 0.1, 24: 0.05}},
}


@pytest.mark.parametrize("scores", CASES.values(), ids=list(CASES))
def test_table_and_summary(scores: dict[str, dict[int, float]]) -> None:
    layers = sorted(set().union(*scores.values()))
    parameters, seconds = {k: 10_000_000 + 7_300_000 * k for k in layers}, {k: 0.5 + k / 7 for k in layers}
    baselines = {task: 0.45 - position / 10 for position, task in enumerate(scores)}
    page = report_html(
        make_frame(scores), title="T", how={}, parameters=parameters, seconds=seconds,
        baselines={"BM25": baselines},
    )  # fmt: skip
    head, *rows, foot = table_cells(page)
    averaged = len(scores) > 1
    assert head == ["Layer", "Parameters, M", "Milliseconds", *(["Average"] if averaged else []), *scores]
    complete = [k for k in layers if all(k in values for values in scores.values())]
    means = {k: 100 * sum(values[k] for values in scores.values()) / len(scores) for k in complete}
    assert rows == [
        [
            str(k),
            format_number(parameters[k] / 1e6),
            f"{1e3 * seconds[k]:.4g}" if seconds[k] >= 1 else f"{1e3 * seconds[k]:.3g}",
        ]
        + ([format_number(means[k]) if k in means else "–"] if averaged else [])
        + [format_number(100 * values[k]) if k in values else "–" for values in scores.values()]
        for k in layers
    ]
    mean = sum(100 * value for value in baselines.values()) / len(baselines)
    expected = [format_number(100 * value) for value in baselines.values()]
    assert foot == ["BM25", "–", "–", *([format_number(mean)] if averaged else []), *expected]
    best = min(means, key=lambda k: (-means[k], k))
    winner = re.findall(r'<tr class="winner"><th scope="row">(\d+)</th>', page)
    assert winner == [str(best)]


@pytest.mark.parametrize("scores", CASES.values(), ids=list(CASES))
def test_captions_of_each_task(scores: dict[str, dict[int, float]]) -> None:
    page = unescape(report_html(make_frame(scores), title="T", how={}))
    for task, values in scores.items():
        best, last = min(values, key=lambda k: (-values[k], k)), max(values)
        if len(scores) > 1:
            caption = f"{task}: measure of {task}: best {format_number(100 * values[best])} at {best}"
            if best != last:
                difference = 100 * (values[last] - values[best])
                change = format_number(difference) if round(difference, 1) else "0.0"
                caption += f" · last {format_number(100 * values[last])} ({change})"
            label = re.search(r'alt="(average.*?)"', page)
            assert label is not None
            assert f"; {caption}" in label[1]


def test_figures_draw_the_same_points() -> None:
    for scores in CASES.values():
        frame = make_frame(scores)
        figure = plot_scores(frame)
        complete = sorted(set.intersection(*(set(values) for values in scores.values())))
        means = {k: 100 * sum(values[k] for values in scores.values()) / len(scores) for k in complete}
        curves: list[dict[int, float]] = [means]
        if len(scores) > 1:
            curves += [{k: 100 * values[k] for k in sorted(values)} for values in scores.values()]
        for axes, curve in zip(figure.axes, curves, strict=True):
            best, last = min(curve, key=lambda k: (-curve[k], k)), max(curve)
            line, *marks = axes.lines
            assert list(line.get_xdata()) == list(curve)
            assert list(line.get_ydata()) == pytest.approx(list(curve.values()))
            positions = [(mark.get_xdata()[0], mark.get_ydata()[0]) for mark in marks]
            expected = [(last, curve[last]), (best, curve[best])] if best != last else [(best, curve[best])]
            assert positions[: len(expected)] == [pytest.approx(position) for position in expected]
            assert axes.get_xlim()[0] < 0 < DEPTH < axes.get_xlim()[1]


def test_metrics_are_in_the_table_and_the_figure_by_dataset() -> None:
    frame = metrics_frame(6, names=["curvature", "lidar"], datasets=["one", "two"]).filter(
        ~((pl.col("dataset") == "two") & (pl.col("layer") == 3))
    )
    values = {(n, d, k): v for n, d, k, v in frame.select("name", "dataset", "layer", "value").iter_rows()}
    head, *rows = table_cells(
        report_html(frame.sample(fraction=1, shuffle=True, seed=1).sort("name"), title="T", how={}), "Metrics by layer"
    )
    columns = [(name, texts) for name in ("curvature", "lidar") for texts in ("one", "two")]
    order = [next(c for c in columns if " ".join(c) == title) for title in head[1:]]
    assert sorted(order) == sorted(columns)
    for layer, row in enumerate(rows):
        assert row[0] == str(layer)
        assert row[1:] == [
            f"{values[name, texts, layer]:#.4g}".replace("-", "−") if (name, texts, layer) in values else "–"
            for name, texts in order
        ]
    for axes in plot_metrics(frame).axes:
        for line in axes.lines:
            name, texts = axes.get_title(loc="left"), str(line.get_label())
            curve = {k: v for (n, d, k), v in values.items() if (n, d) == (name, texts)}
            assert list(line.get_xdata()) == list(curve)
            assert list(line.get_ydata()) == list(curve.values())


HOSTILE = "<script>alert(\"1\")</script><i x='y'>&amp;"


@pytest.mark.parametrize(
    "location", ["model", "task", "only task", "metric", "texts", "how", "notes", "export", "title", "baseline"]
)
def test_malicious_name_is_shown_literally(location: str) -> None:
    """One name at a time, so that no other occurrence on the page can hide one that was not escaped."""
    scores = make_frame(CASES["a task on some layers"])
    frame = pl.concat([scores, metrics_frame(DEPTH, names=["lidar"], datasets=["a", "b"], model="m")])
    columns = {
        "task": ("dataset", "A"),
        "metric": ("name", "lidar"),
        "texts": ("dataset", "a"),
        "model": ("model", "m"),
    }
    if location == "only task":
        frame = frame.filter(pl.col("dataset") != "B")
    if location.removeprefix("only ") in columns:
        column, name = columns[location.removeprefix("only ")]
        frame = frame.with_columns(pl.col(column).replace({name: HOSTILE}))
    options: dict[str, Any] = {"title": "T", "how": {"seed": "0"}, "baselines": {"TF-IDF": {"B": 0.5}}}
    options |= {
        "title": {"title": HOSTILE}, "how": {"how": {HOSTILE: HOSTILE}}, "notes": {"notes": [HOSTILE]},
        "export": {"export": {HOSTILE: HOSTILE}}, "baseline": {"baselines": {HOSTILE: {"B": 0.5}}},
    }.get(location, {})  # fmt: skip
    check_harmless(report_html(frame, **options))


def check_harmless(page: str) -> None:
    assert "<script" not in page
    assert "<i x=" not in page
    bare = re.sub("<wbr>", "", page)
    assert HOSTILE in unescape(bare)
    assert not re.search(r"&(?!amp;|lt;|gt;|quot;|#34;|#39;|#x27;)", page)
    assert "&amp;amp;" in bare  # the ampersand itself is escaped once
    assert "&amp;lt;" not in bare


@pytest.mark.parametrize("location", ["base", "model", "name", "how", "notes"])
def test_malicious_name_in_a_comparison(location: str) -> None:
    rows = [("a", model, k, k, k / 2, "t", "lidar", 1.0, 0.5, 1.5) for model in "bc" for k in range(3)]
    differences = pl.DataFrame(rows, schema=DIFFERENCES, orient="row")
    if location in ("base", "model", "name"):
        replacement = pl.col(location).replace({"a": HOSTILE, "b": HOSTILE, "lidar": HOSTILE})
        differences = differences.with_columns(replacement)
    texts = {"how": {HOSTILE: HOSTILE} if location == "how" else {}, "notes": [HOSTILE] if location == "notes" else []}
    check_harmless(comparisons_html(metrics_frame(2, names=["lidar"]), differences, **texts))  # type: ignore[arg-type]


@pytest.mark.parametrize("location", ["model", "dataset", "name", "title", "notes"])
def test_malicious_name_in_a_training_history(location: str) -> None:
    rows = [
        ("m", f"step{step}", k, k / 2, "metric", data, "dime", step + k)
        for step in (1, 2)
        for k in range(3)
        for data in "tu"
    ]
    frame = rows_frame(rows)
    if location in frame.columns:
        frame = frame.with_columns(pl.col(location).replace({"m": HOSTILE, "t": HOSTILE, "dime": HOSTILE}))
    texts = {"title": HOSTILE if location == "title" else "T", "notes": [HOSTILE] if location == "notes" else []}
    check_harmless(steps_html(frame, how={}, **texts))  # type: ignore[arg-type]


def test_tables_of_a_comparison_hold_every_difference_and_interval() -> None:
    """Four metrics fill two tables for each model."""
    names, models = ("lidar", "dime", "curvature", "anisotropy"), ("b", "c")
    rows = [
        ("a", model, k, k, k / 2, "t", name, value, value - 0.25, value + 0.5)
        for place, (model, name) in enumerate((model, name) for model in models for name in names)
        for k in range(3)
        for value in [10.0 * place + k - 1]
    ]
    differences = pl.DataFrame(rows, schema=DIFFERENCES, orient="row")
    page = comparisons_html(metrics_frame(2, names=["lidar"]), differences, how={"seed": "7"}, notes=["a note"])
    for model in models:
        heads: list[str] = []
        columns: list[list[str]] = []
        tables = re.findall(rf"<table><caption>{model} minus a by layer, and the interval.*?</table>", page)
        assert len(tables) == 2
        for table in tables:
            head, *cells = table_cells(table, model)
            heads += head[1:]
            columns += [list(column) for column in zip(*cells, strict=True)][1:]
        assert heads == list(names)
        own = [row for row in rows if row[1] == model]
        expected = [[row for row in own if row[6] == name] for name in names]
        assert columns == [
            ["{:+.3g} ({:+.3g} to {:+.3g})".format(*row[7:]).replace("-", "−") for row in part] for part in expected
        ]
    facts = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert facts == {"lidar": METRIC_MEANINGS["lidar"], "Base": "a", "Compared": "b, c", "seed": "7"}
    assert "<h1>b and c against a</h1>" in page
    assert "<p>a note</p>" in page


def test_confirmed_scores_are_beside_those_of_their_layer() -> None:
    scores = {"A": {0: 0.5, 3: 0.25, 12: 0.125}, "B": {3: 0.75, 12: 0.625}}
    confirmed = make_frame({"A": {12: 0.13, 3: 0.26}, "B": {12: 0.63}}).with_columns(kind=pl.lit("confirmed"))
    both = pl.concat([make_frame(scores), confirmed])
    assert confirmed_words(both) == "mteb confirmed 3 scores: they differ by at most 1.00 points (A at layer 3)."
    assert confirmed_words(make_frame(scores)) == ""
    other = pl.concat([make_frame({"A": {3: 0.9}}), confirmed.filter(dataset="A", layer=3)])
    recipes = pl.concat([both.with_columns(recipe=pl.lit("plain")), other.with_columns(recipe=pl.lit("echo"))])
    assert confirmed_words(recipes) == "mteb confirmed 4 scores: they differ by at most 64.00 points (A at layer 3)."
    page = report_html(pl.concat([make_frame(scores), confirmed]).filter(layer=12), title="T", how={}, notes=["a note"])
    assert "<h2>Confirmed by mteb</h2>" in page
    assert "mteb confirmed 2 scores: they differ by at most 0.50 points (" in page


def test_remarks_about_missing_scores_are_before_the_notes() -> None:
    page = report_html(make_frame({"A": {3: 0.5}, "B": {4: 0.5}}), title="T", how={}, notes=["a note"])
    assert re.findall("<p>(.*?)</p>", page)[:2] == [
        "No layer was scored on every task, so there is no average.",
        "a note",
    ]


def test_page_says_what_each_metric_means() -> None:
    assert METRIC_MEANINGS.keys() == {*METRICS, *METRIC_ALIASES}
    rows = [("m", "main", layer, layer / 2, "metric", "texts", "lidar", float(layer)) for layer in range(3)]
    page = report_html(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"), title="T", how={})
    assert f"<dt>lidar</dt><dd>{METRIC_MEANINGS['lidar']}</dd>" in page
    assert METRIC_MEANINGS["dime"] not in page


def test_chart_comes_before_the_words() -> None:
    frame = make_frame({"A": {0: 0.5, 1: 0.6}, "B": {0: 0.5, 1: 0.7}})
    page = report_html(frame, title="T", how={}, baselines={"TF-IDF": {"A": 0.1}}, export={"Python": "x"})
    main = page[page.index("<h2>") :]
    assert main.index("<img") < main.index("In points (score")
    assert main.index("<img") < main.index("<h2>Use this layer</h2>")
