"""Texts of the paper's experiments for small frames whose numbers are easy to verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midlayer_encoders.comparing.correlation import CORRELATION_SCHEMA
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.paper.reproduce import EXPERIMENTS
from midlayer_encoders.paper.setting import Setting
from midlayer_encoders.paper.token_experiments import order_entropies
from tests.selection.frames import frame


def extra(rows: list[tuple[Any, ...]], **columns: pl.DataType) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={**FRAME_SCHEMA, **columns}, orient="row")


def of_metric(name: str, values: list[float], *, model: str = "m", more: Any = ()) -> list[tuple[Any, ...]]:
    last = len(values) - 1
    return [(model, "main", k, k / last, "metric", "t", name, v, *more) for k, v in enumerate(values)]


def words(name: str, stored: pl.DataFrame) -> list[str]:
    return EXPERIMENTS[name].words(stored)


def test_scores_by_depth() -> None:
    swept = frame({"dime": [9.0] * 5}, {"A": [0.1, 0.2, 0.5, 0.9, 0.3], "B": [0.3, 0.4, 0.6, 0.2, 0.5]}, num_layers=4)
    partial = swept.filter((pl.col("layer") != 3) | (pl.col("dataset") != "B"))
    setting = Setting((), lambda _: pytest.fail("no model is needed"), Path(), swept=(partial,))
    process = EXPERIMENTS["fig1"].run(setting)
    assert set(process["kind"]) == {"score"}
    line = EXPERIMENTS["fig1"].draw(process).axes[0].lines[0]
    assert line.get_xdata().tolist() == [0, 25, 50, 100], "layer 3 lacks a task"
    assert line.get_ydata().tolist() == pytest.approx([20, 30, 55, 40])
    assert words("fig1", process) == ["m (2 tasks): best 55.0 at 50 % of the depth, +15.0 over the last layer."]


def test_valley_of_prompt_entropy() -> None:
    rows = of_metric("prompt_entropy", [3.0, 2.5, 1.25, 2.0, 2.75]) + of_metric("lidar", [0.0] * 5)
    rows += of_metric("prompt_entropy", [0.9, 0.4, 0.8], model="p")
    for name in ("fig2", "fig10", "fig12"):
        assert sorted(words(name, extra(rows[::-1]))) == [
            "m: prompt entropy 3.00 at the first layer, lowest 1.25 at 50 % of the depth, 2.75 at the last (nats).",
            "p: prompt entropy 0.90 at the first layer, lowest 0.40 at 50 % of the depth, 0.80 at the last (nats).",
        ]


def test_correlations_are_sorted_and_undefined_ones_are_reported() -> None:
    rows = []
    for task, shift in (("average", 0.0), ("A", 0.5)):
        for metric, value in (("lidar", 0.25), ("dime", 0.375)):
            start = ("m", "main", metric, task)
            rows += [
                (*start, "spearman", -value - shift, -0.75, -0.125, 5, ""),
                (*start, "kendall", value / 2, None, None, 5, ""),
                (*start, "dcor", value + shift, 0.0, 1.0, 5, ""),
                (*start, "signed_dcor", -9.0, 0.0, 1.0, 5, ""),
            ]
    rows += [("m", "main", "infonce", "average", item, None, None, None, 5, "undefined: flat") for item in ("dcor",)]
    stored = pl.DataFrame(rows, schema=CORRELATION_SCHEMA, orient="row")
    assert words("fig3", stored) == [
        "m, distance correlation with the mean score: dime 0.38, lidar 0.25.",
        "m: infonce undefined: flat.",
    ]
    table = EXPERIMENTS["fig8"].table(stored)  # type: ignore[misc]
    assert table == (
        ("model", "metric", "spearman", "kendall", "dcor"),
        ("m", "lidar", "−0.25 (−0.75 to −0.12)", "0.12", "0.25 (0.00 to 1.00)"),
        ("m", "dime", "−0.38 (−0.75 to −0.12)", "0.19", "0.38 (0.00 to 1.00)"),
        ("m", "infonce", "–", "–", "–"),
    )
    assert EXPERIMENTS["fig3"].table(stored)[1] == ("m", "lidar", "0.25 (0.00 to 1.00)")  # type: ignore[misc]


def test_along_solutions() -> None:
    columns = {"position": pl.Int64(), "deviation": pl.Float64(), "texts": pl.Int64()}
    rows = [
        (model, "main", k, k / 1, "metric", "t", "prompt_entropy", add + k + position / 8, position, k + 0.5, count)
        for model, add in (("m", 0.0), ("n", 4.0))
        for k in (0, 1)
        for position, count in ((4, 10), (8, 5), (12, 4))
    ]
    assert words("fig5", extra(rows, **columns)) == [
        "m, after 8 tokens: 1.50 nats over all layers, with a deviation over texts of 1.00.",
        "n, after 8 tokens: 5.50 nats over all layers, with a deviation over texts of 1.00.",
    ], "few texts are longer"
    assert "pass --model twice" in words("fig5", extra(rows[:6], **columns))[-1]


def test_extreme_prompts_by_thirds_of_the_layers() -> None:
    columns = {"condition": pl.String(), "amount": pl.Float64()}
    rows = []
    for amount, times in ((0.5, 7.0), (1.0, 3.0), (0.0, 1.0)):
        rows += of_metric(
            "prompt_entropy", [times * item for item in (1, 3, 5, 7, 10, 20, 60)], more=("repetition", amount)
        )
    assert words("fig6", extra(rows, **columns)) == [
        "m, repetition from 0 to 1: 2.00 to 6.00 in the first third, 6.00 to 18.00 in the middle third, "
        "30.00 to 90.00 in the last third of the layers."
    ], "layers 0 and 1, 2 and 3, 4 to 6"


def test_orders_of_the_entropy() -> None:
    stored = order_entropies([2.0, 1.0], [0.0, 1.0], size=4)
    (sentence,) = words("fig7", stored)
    tail = {
        a: v for a, b, n, v in stored.select("alpha", "beta", "name", "value").rows() if b == 1 and n == "tail_share"
    }
    assert f"carries {100 * tail[1.0]:.1f} % (α = 1), {100 * tail[2.0]:.1f} % (α = 2) of the entropy" in sentence


def test_tuned_models_against_the_first() -> None:
    rows = of_metric("prompt_entropy", [1.0, 2.0, 3.0], model="base") + of_metric(
        "infonce", [2.0, 2.0, 5.0], model="base"
    )
    rows += of_metric("prompt_entropy", [1.5, 2.5, 5.0], model="a") + of_metric("infonce", [0.0, 1.0, 2.0], model="a")
    assert words("fig13", extra(rows)) == [
        "a against base, mean over layers: prompt entropy +1.00 nats, InfoNCE −2.00 (lower is more invariant)."
    ]


def test_inside_the_blocks() -> None:
    rows = []
    for site, times in (("residual_in", 9.0), ("mlp_in", 1.0), ("residual_out", 2.0)):
        for name in ("prompt_entropy", "prompt_effective_rank"):
            values = [times * item for item in (100, 1, 2, 3, 4, 50, 60)] if name == "prompt_entropy" else [7.0] * 7
            rows += of_metric(name, values, more=(site,))
    assert words("fig15", extra(rows, site=pl.String())) == [
        "m, mean prompt entropy between 30 and 80 % of the depth: mlp in 3.00, residual out 6.00 nats."
    ], "layers 2, 3 and 4 of 6"


def test_training_is_described_by_model() -> None:
    rows = [
        ("m", f"step{step}", k, k / 2, "metric", "t", "lidar", value)
        for step, values in ((1, (5.0, 1.0, 3.0)), (2, (5.0, 3.0, 3.0)))
        for k, value in enumerate(values)
    ]
    assert words("fig4", extra(rows))[0].startswith("m: Between successive steps a layer moves by 0.0 %")


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
    assert words("table2", process) == [
        "m: the best layer 42.5, the last 35.0; of the rules without labels fixed-depth is best with 40.0."
    ]
