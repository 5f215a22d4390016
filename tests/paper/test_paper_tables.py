"""Tables of the paper's experiments for small frames whose numbers are easy to verify."""

from pathlib import Path

import polars as pl
import pytest

from benchmarks.paper.reproduce import EXPERIMENTS
from benchmarks.paper.setting import Setting
from midlayer_encoders.comparing.correlation import CORRELATION_SCHEMA
from tests.selection.frames import frame


def test_scores_by_depth() -> None:
    swept = frame({"dime": [9.0] * 5}, {"A": [0.1, 0.2, 0.5, 0.9, 0.3], "B": [0.3, 0.4, 0.6, 0.2, 0.5]}, num_layers=4)
    partial = swept.filter((pl.col("layer") != 3) | (pl.col("dataset") != "B"))
    setting = Setting((), lambda _: pytest.fail("no model is needed"), Path(), swept=(partial,))
    process = EXPERIMENTS["fig1"].run(setting)
    assert set(process["kind"]) == {"score"}
    line = EXPERIMENTS["fig1"].draw(process).axes[0].lines[0]
    assert line.get_xdata().tolist() == [0, 25, 50, 100], "layer 3 lacks a task"
    assert line.get_ydata().tolist() == pytest.approx([20, 30, 55, 40])


def test_correlations_and_undefined_ones_are_in_the_table() -> None:
    rows = []
    for task, shift in (("average", 0.0), ("A", 0.5)):
        for metric, value in (("lidar", 0.25), ("dime", 0.375)):
            start = ("m", "main", metric, task)
            rows += [
                (*start, "spearman", -value - shift, 0.625, 0.75, 5, ""),
                (*start, "kendall", value / 2, 0.125, None, 5, ""),
                (*start, "dcor", value + shift, 0.04, 0.1875, 5, ""),
                (*start, "signed_dcor", -9.0, 0.0, 1.0, 5, ""),
            ]
    rows += [("m", "main", "infonce", "average", item, None, None, None, 5, "undefined: flat") for item in ("dcor",)]
    stored = pl.DataFrame(rows, schema=CORRELATION_SCHEMA, orient="row")
    table = EXPERIMENTS["fig8"].table(stored)  # type: ignore[misc]
    assert table == (
        ("model", "metric", "spearman", "kendall", "dcor"),
        ("m", "lidar", "−0.25 (p 0.62, threshold 0.75)", "0.12 (p 0.12)", "0.25 (p 0.04, threshold 0.19)"),
        ("m", "dime", "−0.38 (p 0.62, threshold 0.75)", "0.19 (p 0.12)", "0.38 (p 0.04, threshold 0.19)"),
        ("m", "infonce", "–", "–", "–"),
    )
    assert EXPERIMENTS["fig3"].table(stored)[1] == ("m", "lidar", "0.25 (p 0.04, threshold 0.19)")  # type: ignore[misc]


def test_layers_selected_by_rules() -> None:
    """Eleven layers; A's own texts have the lowest DiME at layer 2, all others at 6. Layer 5 was not scored.

    InfoNCE was not measured on C's own texts, so C counts for no rule.
    """
    dime = [9.0, 8, 7, 6, 5, 4, 1, 3, 4, 5, 6]
    scores = {"A": [k / 20 for k in range(11)], "B": [(10 - 2 * abs(k - 7)) / 20 for k in range(11)]}
    scores["C"] = scores["B"]
    own_values = frame({"dime": [9.0, 8, 1, 6, 5, 4, 2, 3, 4, 5, 6], "infonce": [0.0 if k == 5 else 1.0 for k in range(11)]},
                num_layers=10).with_columns(dataset=pl.lit("A"))  # fmt: skip
    lacking = frame({"dime": dime}, num_layers=10).with_columns(dataset=pl.lit("C"))
    swept = pl.concat([frame({"dime": dime}, scores, num_layers=10), own_values, lacking])
    swept = swept.filter((pl.col("kind") != "score") | (pl.col("layer") != 5))
    setting = Setting((), lambda _: pytest.fail("no model is needed"), Path(), swept=(swept,))
    process = EXPERIMENTS["table2"].run(setting)
    layers = {(task, rule): layer for task, rule, layer in process.select("dataset", "name", "layer").rows()}
    assert {key: layers[key] for key in layers if key[0] == "A"} == {
        ("A", "best"): 7, ("A", "last"): 10, ("A", "fixed-depth"): 8, ("A", "min-dime"): 2, ("A", "min-infonce"): 4,
    }  # fmt: skip
    assert layers["B", "min-dime"] == 6
    assert {task for task, _ in layers} == {"A", "B"}
    values = {(task, rule): value for task, rule, value in process.select("dataset", "name", "value").rows()}
    assert values["A", "min-dime"] == scores["A"][2]
    assert values["B", "last"] == scores["B"][10]
    assert process["depth"].to_list() == [layer / 10 for layer in process["layer"]]
    table = dict(EXPERIMENTS["table2"].table(process)[1:])  # type: ignore[misc, arg-type]
    assert table["best"] == "42.5 (2 tasks)"
    assert table["last"] == "35.0 (2 tasks)"
    assert table["min-dime"] == "25.0 (2 tasks)"
    assert table["min-prompt-entropy"] == "–"
