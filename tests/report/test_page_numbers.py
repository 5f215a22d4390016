"""Every number on a page, worked out again from the frame in plain Python."""

from __future__ import annotations

import random
import re
from html import unescape
from typing import Any

import polars as pl
import pytest

from midlayer_encoders.report import plot_heatmap, plot_metrics, plot_scores, report_html
from midlayer_encoders.report.comparison_page import DIFFERENCES, SIMILARITY, comparisons_html
from midlayer_encoders.report.training_page import steps_html
from tests.report.made_frames import metrics_frame, rows_frame

DEPTH = 24


def frame_of(scores: dict[str, dict[int, float]], *, model: str = "m") -> pl.DataFrame:
    """Return a frame of scores of a model of 24 blocks, its rows in no order."""
    rows = [
        (model, "main", layer, layer / DEPTH, "score", task, f"measure of {task}", value)
        for task, values in scores.items()
        for layer, value in values.items()
    ]
    first = [next(row for row in rows if row[5] == task) for task in scores]  # tasks stay in their order
    rest = [row for row in rows if row not in first]
    random.Random(4).shuffle(rest)
    return rows_frame([*first, *rest])


def rows_of(page: str, caption: str = "Points by layer") -> list[list[str]]:
    """Return the cells of the first table of that caption, heading first."""
    table = re.search(rf"<table><caption>{caption}.*?</table>", page)
    assert table is not None
    rows = re.findall(r"<tr.*?</tr>", table[0])
    return [
        [unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows
    ]


def text_of(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


CASES: dict[str, dict[str, dict[int, float]]] = {
    "some layers": {"A": {0: 0.31, 6: 0.52, 12: 0.47, 24: 0.4}, "B": {0: 0.1, 6: 0.2, 12: 0.7, 24: 0.15}},
    "a task on some layers": {"A": {0: 0.31, 6: 0.99, 12: 0.47, 24: 0.4}, "B": {0: 0.1, 12: 0.7, 24: 0.95}},
    "ties": {"A": {0: 0.5, 6: 0.5, 24: 0.25}, "B": {0: 0.25, 6: 0.25, 24: 0.5}, "C": {0: 0.0, 6: 0.0, 24: 0.0}},
    "the last is best": {"A": {3: 0.2, 9: 0.4, 21: 0.6}},
    "below zero": {"A": {0: -0.3, 8: -0.1, 24: -0.2}, "B": {0: -0.2, 8: 0.1, 24: 0.05}},
}


@pytest.mark.parametrize("scores", CASES.values(), ids=list(CASES))
def test_the_table_the_tiles_and_the_verdict(scores: dict[str, dict[int, float]]) -> None:
    layers = sorted(set().union(*scores.values()))
    parameters, seconds = {k: 10_000_000 + 7_300_000 * k for k in layers}, {k: 0.5 + k / 7 for k in layers}
    baselines = {task: 0.45 - place / 10 for place, task in enumerate(scores)}
    page = report_html(
        frame_of(scores), title="T", how={}, parameters=parameters, seconds=seconds,
        baselines={"BM25": baselines},
    )  # fmt: skip
    head, *rows, foot = rows_of(page)
    averaged = len(scores) > 1
    assert head == ["Layer", "Parameters, M", "Milliseconds", *(["Average"] if averaged else []), *scores]
    complete = [k for k in layers if all(k in values for values in scores.values())]
    means = {k: 100 * sum(values[k] for values in scores.values()) / len(scores) for k in complete}
    assert rows == [
        [
            str(k),
            text_of(parameters[k] / 1e6),
            f"{1e3 * seconds[k]:.4g}" if seconds[k] >= 1 else f"{1e3 * seconds[k]:.3g}",
        ]
        + ([text_of(means[k]) if k in means else "–"] if averaged else [])
        + [text_of(100 * values[k]) if k in values else "–" for values in scores.values()]
        for k in layers
    ]
    mean = sum(100 * value for value in baselines.values()) / len(baselines)
    expected = [text_of(100 * value) for value in baselines.values()]
    assert foot == ["BM25", "", "", *([text_of(mean)] if averaged else []), *expected]
    best, last = min(means, key=lambda k: (-means[k], k)), max(means)
    tiles = [
        unescape(re.sub("<.*?>", " ", one)).split("  ")
        for one in re.findall(r"<div><dt>(.*?)</div>", page.split("</header>")[0])
    ]
    shown = [[part.strip() for part in tile if part.strip()] for tile in tiles]
    wanted = [["Best layer", f"{best} of 24", f"{text_of(means[best])} points"]]
    if best != last:
        gain, less = means[best] - means[last], 100 * (parameters[best] / parameters[last] - 1)
        faster = 100 * (seconds[best] / seconds[last] - 1)
        sign = "+" if round(gain, 1) > 0 else ""
        wanted += [
            ["Gain in points", f"{sign}{text_of(gain)}", f"{text_of(means[best])} instead of {text_of(means[last])}"],
            ["Parameters", f"{text_of(less, 0)} %", f"{parameters[best] / 1e6:,.1f} M instead of {parameters[last] / 1e6:,.1f} M"],
            ["Time", f"{text_of(faster, 0)} %", " instead of ".join(f"{s:.3g} s" if s >= 1 else f"{1e3 * s:.3g} ms" for s in (seconds[best], seconds[last]))],
        ]  # fmt: skip
    assert shown == wanted
    ahead = [task for task, values in scores.items() if baselines[task] > max(values.values())]
    assert ("is ahead of every layer on" in page) is bool(ahead)
    if ahead:
        assert f"ahead of every layer on {', '.join(ahead)}" in page
    winner = re.findall(r'<tr class="winner"><th scope="row">(\d+)</th>', page)
    assert winner == [str(best)]
    tops = [re.findall(r"<td( class=\"top\")?>", row) for row in re.findall(r"<tr.*?</tr>", page)[1 : len(layers) + 1]]
    curves = [*([means] if averaged else []), *scores.values()]
    for column, curve in enumerate(curves, start=2):
        at = min(curve, key=lambda k: (-curve[k], k))
        assert [layers[row] for row, cells in enumerate(tops) if cells[column]] == [at]


@pytest.mark.parametrize("scores", CASES.values(), ids=list(CASES))
def test_words_and_heat_of_each_task(scores: dict[str, dict[int, float]]) -> None:
    """The caption of each panel, the tip of each point and of each cell of the heat map."""
    page = unescape(report_html(frame_of(scores), title="T", how={}))
    for task, values in scores.items():
        best, last = min(values, key=lambda k: (-values[k], k)), max(values)
        if len(scores) > 1:
            words = [f"measure of {task}", f"best {text_of(100 * values[best])} at {best}"]
            if best != last:
                worse = 100 * (values[last] - values[best])
                words.append(f"last {text_of(100 * values[last])} ({text_of(worse) if round(worse, 1) else '0.0'})")
            shown = re.search(rf"<h3>{task}</h3>(.*?)</figcaption>", page)
            assert shown is not None
            assert re.sub("<.*?>", "", shown[1]) == " · ".join(words)
        for layer, value in values.items():
            below = text_of(100 * (values[best] - value))
            tip = f"{task}, layer {layer}: {text_of(100 * value)}"
            assert f"<title>{tip}</title>" in page
            assert f'title="{tip}, {below} below its best"' in page
        label = f'aria-label="{task}: best at layer {best}, {text_of(100 * values[best])} points"'
        assert label in page
        peak = re.search(rf'{re.escape(label)}>.*?title="([^"]*)" class="peak"', page)
        assert peak is not None
        assert peak[1].startswith(f"{task}, layer {best}: ")
        absent = set().union(*scores.values()) - set(values)
        assert all(f'title="{task}, layer {layer}: not scored" class="gap"' in page for layer in absent)


def test_figures_draw_the_same_points() -> None:
    for scores in CASES.values():
        frame = frame_of(scores)
        figure, heat = plot_scores(frame), plot_heatmap(frame)
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
            places = [(mark.get_xdata()[0], mark.get_ydata()[0]) for mark in marks]
            wanted = [(last, curve[last]), (best, curve[best])] if best != last else [(best, curve[best])]
            assert places[: len(wanted)] == [pytest.approx(place) for place in wanted]
            assert axes.get_xlim()[0] < 0 < DEPTH < axes.get_xlim()[1]
        layers = sorted(set().union(*scores.values()))
        values = heat.axes[0].collections[0].get_array()
        assert values is not None
        rows = curves if len(scores) > 1 else curves[:1]
        for drawn, curve in zip(values.filled(-1).tolist(), rows, strict=True):
            top = max(curve.values())
            assert drawn == pytest.approx([top - curve[k] if k in curve else -1 for k in layers])
        rings = [[ring.get_xdata()[0], ring.get_ydata()[0]] for ring in heat.axes[0].lines if ring.get_marker() == "o"]
        peaks = [layers.index(min(curve, key=lambda k: (-curve[k], k))) for curve in rows]
        assert rings == [[peak, row] for row, peak in enumerate(peaks)]


def test_metrics_are_in_the_table_and_the_figure_by_texts() -> None:
    frame = metrics_frame(6, names=["curvature", "lidar"], datasets=["one", "two"]).filter(
        ~((pl.col("dataset") == "two") & (pl.col("layer") == 3))
    )
    values = {(n, d, k): v for n, d, k, v in frame.select("name", "dataset", "layer", "value").iter_rows()}
    head, *rows = rows_of(
        report_html(frame.sample(fraction=1, shuffle=True, seed=1).sort("name"), title="T", how={}), "Metrics by layer"
    )
    columns = [(name, texts) for name in ("curvature", "lidar") for texts in ("one", "two")]
    order = [next(c for c in columns if "".join(c) == one) for one in head[1:]]
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
            mine = {k: v for (n, d, k), v in values.items() if (n, d) == (name, texts)}
            assert list(line.get_xdata()) == list(mine)
            assert list(line.get_ydata()) == list(mine.values())


HOSTILE = "<script>alert(\"1\")</script><i x='y'>&amp;"


@pytest.mark.parametrize(
    "place", ["model", "task", "only task", "metric", "texts", "how", "notes", "export", "title", "baseline"]
)
def test_a_hostile_name_is_shown_as_it_is(place: str) -> None:
    """One name at a time, so that no other use of it on the page can stand in for the one that was forgotten."""
    scores = frame_of(CASES["a task on some layers"])
    frame = pl.concat([scores, metrics_frame(DEPTH, names=["lidar"], datasets=["a", "b"], model="m")])
    columns = {
        "task": ("dataset", "A"),
        "metric": ("name", "lidar"),
        "texts": ("dataset", "a"),
        "model": ("model", "m"),
    }
    if place == "only task":
        frame = frame.filter(pl.col("dataset") != "B")
    if place.removeprefix("only ") in columns:
        column, name = columns[place.removeprefix("only ")]
        frame = frame.with_columns(pl.col(column).replace({name: HOSTILE}))
    options: dict[str, Any] = {"title": "T", "how": {"seed": "0"}, "baselines": {"TF-IDF": {"B": 0.5}}}
    options |= {
        "title": {"title": HOSTILE}, "how": {"how": {HOSTILE: HOSTILE}}, "notes": {"notes": [HOSTILE]},
        "export": {"export": {HOSTILE: HOSTILE}}, "baseline": {"baselines": {HOSTILE: {"B": 0.5}}},
    }.get(place, {})  # fmt: skip
    check_harmless(report_html(frame, **options))


def check_harmless(page: str) -> None:
    page, _, own = page.rpartition("<script>")
    assert own.count("</script>") == 1
    assert "<script" not in page
    assert "<i x=" not in page
    bare = re.sub("<wbr>", "", page)
    assert HOSTILE in unescape(bare)
    assert not re.search(r"&(?!amp;|lt;|gt;|quot;|#34;|#39;|#x27;)", page)
    assert "&amp;amp;" in bare  # the ampersand itself was escaped, once
    assert "&amp;lt;" not in bare


@pytest.mark.parametrize("place", ["base", "model", "name", "how", "notes"])
def test_a_hostile_name_among_models_side_by_side(place: str) -> None:
    rows = [("a", model, k, k, k / 2, "t", "lidar", 1.0, 0.5, 1.5) for model in "bc" for k in range(3)]
    alike = [("a", model, j, k, 0.5) for model in "bc" for j in range(3) for k in range(3)]
    frames = [
        pl.DataFrame(rows, schema=DIFFERENCES, orient="row"),
        pl.DataFrame(alike, schema=SIMILARITY, orient="row"),
    ]
    if place in ("base", "model", "name"):
        bad = pl.col(place).replace({"a": HOSTILE, "b": HOSTILE, "lidar": HOSTILE})
        frames = [frame.with_columns(bad) if place in frame.columns else frame for frame in frames]
    said = {"how": {HOSTILE: HOSTILE} if place == "how" else {}, "notes": [HOSTILE] if place == "notes" else []}
    check_harmless(comparisons_html(metrics_frame(2, names=["lidar"]), *frames, **said))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["model", "dataset", "name", "title", "notes"])
def test_a_hostile_name_in_a_training_history(place: str) -> None:
    rows = [
        ("m", f"step{step}", k, k / 2, "metric", data, "dime", step + k)
        for step in (1, 2)
        for k in range(3)
        for data in "tu"
    ]
    frame = rows_frame(rows)
    if place in frame.columns:
        frame = frame.with_columns(pl.col(place).replace({"m": HOSTILE, "t": HOSTILE, "dime": HOSTILE}))
    said = {"title": HOSTILE if place == "title" else "T", "notes": [HOSTILE] if place == "notes" else []}
    check_harmless(steps_html(frame, how={}, **said))  # type: ignore[arg-type]
