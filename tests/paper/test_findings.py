"""Sentences about a model beside the paper's claims, for frames whose numbers are easy to verify."""

import numpy as np
import polars as pl
import pytest

from benchmarks.paper import findings
from benchmarks.paper.token_experiments import order_entropies
from midlayer_encoders.comparing.correlation import correlate
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from tests.selection.frames import frame

RISING = [k / 10 for k in range(5)]


@pytest.mark.parametrize(
    ("shifts", "expected"),
    [
        ([0, 0.1, 0.3, 0.2, 0.1], "m: layer 2 of 4 (50 % of the depth) is best, 70.0 points, "
         "+20.0 (95 % interval +18.8 to +21.2 over 3 tasks) over layer 4. The claim holds here."),
        ([0.4, 0.1, 0.3, 0.2, 0.1], "m: layer 0 of 4 (0 % of the depth) is best, 80.0 points, +30.0 (95 % interval +28.8 "
         "to +31.2 over 3 tasks) over layer 4. Layer 0 is the embeddings, not an intermediate layer. The claim does not "
         "hold here."),
        ([0, 0.1, 0.101, 0.1, 0.1], "m: layer 2 of 4 (50 % of the depth) is best, 50.1 points, +0.1 (95 % interval −1.1 to "
         "+1.3 over 3 tasks) over layer 4. The two are not separable. It stays open here."),
        ([0, 0.1, 0.2, 0.3, 0.4], "m: layer 4 of 4 (100 % of the depth) is best, 80.0 points: the last. The claim does "
         "not hold here."),
    ],
)  # fmt: skip
def test_describe_scores_names_layer_gain_interval_and_verdict(shifts: list[float], expected: str) -> None:
    spread = {"A": -0.005, "B": 0.0, "C": 0.005}  # of the last layer: gains of 0.5 points around their mean
    scores = {task: [0.4 + shift for shift in shifts[:-1]] + [0.4 + shifts[-1] + off] for task, off in spread.items()}
    assert findings.describe_scores(frame(scores=scores, num_layers=4)) == [expected]
    two = frame(scores={task: scores[task] for task in ("A", "B")}, num_layers=4)
    if shifts[4] < max(shifts):
        assert "(no interval over 2 tasks)" in findings.describe_scores(two)[0]


def test_describe_correlations_of_7_layers_is_never_evidence() -> None:
    table = correlate(frame({"dime": [*RISING, 0.5, 0.6]}, {"A": [*RISING, 0.5, 0.6]}, num_layers=6))
    (sentence,) = findings.describe_correlations(table, ("spearman", "dcor"))
    assert sentence.startswith("m, dime: 7 layers are too few to tell a correlation from chance, however large it is")
    assert sentence.endswith("It stays open here.")


def test_describe_correlations_names_the_threshold_and_what_exceeds_it() -> None:
    generator = np.random.default_rng(3)
    score = generator.normal(size=25)
    metrics = {"dime": score.tolist(), "lidar": generator.normal(size=25).tolist()}
    table = correlate(frame(metrics, {"A": score.tolist()}, num_layers=24))
    (sentence,) = findings.describe_correlations(table, ("dcor",))
    rows = table.filter(task="average", statistic="dcor")
    ends = " to ".join(sorted({f"{end:.2f}" for end in rows["threshold"]}))
    lidar = rows.filter(metric="lidar")["value"].item()
    assert sentence == (
        f"m: with 25 layers, distance correlation must exceed {ends}, depending on the metric, to stand out of chance. "
        f"dime 1.00: yes; lidar {lidar:.2f}: no. The claim holds here for 1 of 2 metrics."
    )
    assert len(findings.describe_correlations(table, ("dcor", "kendall"))) == 2
    constant = correlate(frame({"dime": [1.0] * 12}, {"A": score[:12].tolist()}, num_layers=11))
    assert findings.describe_correlations(constant, ("dcor",)) == ["No correlation is defined. It stays open here."]


def test_describe_valley_needs_a_tenth_below_both_ends() -> None:
    deep, flat, falling = ([3.0, 2.0, 1.0, 1.5, 2.0], [3.0, 2.9, 2.8, 2.9, 3.0], [3.0, 2.0, 1.5, 1.2, 1.0])
    for values, expected in ((deep, "1.00 nats, 50 % below the lower end: a valley"), (flat, "no"), (falling, "no")):
        (sentence,) = findings.describe_valley(frame({"prompt_entropy": values}, num_layers=4))
        assert expected in sentence
        assert (": no valley" in sentence) == (expected == "no")


def test_describe_sizes_compares_models_in_their_order() -> None:
    big, small = (
        frame({"prompt_entropy": [3.0, low, 2.0, 2.5, 3.0]}, num_layers=4, model=model)
        for model, low in (("big", 0.5), ("small", 1.5))
    )
    (falls,), (rises,) = (findings.describe_sizes(pl.concat(order)) for order in ((small, big), (big, small)))
    assert falls.endswith("small 1.50, big 0.50. The claim holds here.")
    assert rises.endswith("big 0.50, small 1.50. The claim does not hold here.")
    assert findings.describe_sizes(big)[-1].endswith("It stays open here.")


def test_describe_training_finds_the_third_that_moves_most() -> None:
    for moving, verdict in ((3, "Middle layers change most. The claim holds here."), (0, "do not change most")):
        parts = []
        for step, shift in ((1, 0.0), (2, 1.0)):
            values = [1.0 + shift * (k == moving) + k / 100 for k in range(7)]
            parts.append(frame({"lidar": values}, num_layers=6).with_columns(revision=pl.lit(f"step{step}")))
        assert verdict in findings.describe_training(pl.concat(parts))[-1]
    assert findings.describe_training(parts[0])[-1].endswith("It stays open here.")


def rows_of(rows: list[tuple[object, ...]], **columns: pl.DataType) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={**FRAME_SCHEMA, **columns}, orient="row")


def test_describe_solutions_compares_the_tuned_model_with_the_base() -> None:
    rows = [
        (
            model,
            "main",
            layer,
            layer / 2,
            "metric",
            "s",
            "prompt_entropy",
            entropy + layer,
            position,
            spread,
            8 - position,
        )
        for model, entropy, spread in (("base", 1.0, 0.3), ("tuned", 1.5, 0.2))
        for layer in range(3)
        for position in (1, 4, 7)
    ]
    table = rows_of(rows, position=pl.Int64(), deviation=pl.Float64(), texts=pl.Int64())
    (sentence,) = findings.describe_solutions(table)
    assert "after 4 tokens" in sentence, "one text of seven reaches the seventh"
    assert "base 2.00 nats, 0.30; tuned 2.50 nats, 0.20. The claim holds here." in sentence
    (single,) = findings.describe_solutions(table.filter(model="base"))
    assert single.endswith("The claim compares a base model with a tuned one. It stays open here.")


@pytest.mark.parametrize(("early", "verdict"), [(0.9, "The claim holds here."), (0.7, "The claim does not hold here.")])
def test_describe_prompts_compares_the_ends_of_each_condition(early: float, verdict: str) -> None:
    cells = {
        ("repetition", 0.0): (0.8, 0.6, 0.5), ("repetition", 1.0): (0.7, 0.2, 0.1),
        ("randomness", 0.0): (0.8, 0.6, 0.5), ("randomness", 1.0): (early, 0.5, 0.5),
        ("length", 8.0): (1.0, 0.5, 0.5), ("length", 64.0): (3.0, 1.5, 2.0),
    }  # fmt: skip
    rows = [
        ("m", "main", layer, layer / 5, "metric", "t", "prompt_entropy", values[layer // 2], condition, amount)
        for (condition, amount), values in cells.items()
        for layer in range(6)
    ]
    (sentence,) = findings.describe_prompts(rows_of(rows, condition=pl.String(), amount=pl.Float64()))
    assert "from 0.60 to 0.20 of its maximum" in sentence
    assert f"first third from 0.80 to {early:.2f}" in sentence
    assert sentence.endswith(f"from 0.50 to 1.50 nats. {verdict}")


def test_describe_orders_finds_the_reverse_of_the_claim() -> None:
    (sentence,) = findings.describe_orders(order_entropies())
    assert "contributes 14.2, 13.8, 12.4, 9.2, 8.1, 8.0 % of the entropy" in sentence
    assert sentence.endswith("The claim does not hold here.")


def test_describe_tuning_gives_differences_from_the_base() -> None:
    parts = [
        frame({"infonce": [loss] * 3, "prompt_entropy": [2.0 + loss] * 3, "dataset_entropy": [1.0] * 3}, model=model)
        for model, loss in (("base", 2.0), ("tuned", 1.5))
    ]
    (sentence,) = findings.describe_tuning(pl.concat(parts))
    assert "tuned minus the base" in sentence
    assert "infonce −0.50, prompt entropy −0.50, dataset entropy 0.00" in sentence
    assert sentence.endswith("part of the claim holds here.")


def test_describe_blocks_compares_the_stream_with_the_rest() -> None:
    sites = {"residual_in": 9.0, "attention_in": 3.0, "residual_mid": 1.2, "residual_out": 1.0}
    rows = [
        ("m", "main", layer, layer / 4, "metric", "t", "prompt_entropy", value, site)
        for site, value in sites.items()
        for layer in range(1, 5)
    ]
    (sentence,) = findings.describe_blocks(rows_of(rows, site=pl.String()))
    assert sentence.endswith("attention in 3.00, residual mid 1.20, residual out 1.00. The claim holds here.")


def test_describe_rules_gives_each_rule_an_interval_over_tasks() -> None:
    values = {
        "last": (0.4, 0.5, 0.6),
        "min-dime": (0.5, 0.61, 0.69),
        "min-lidar": (0.3, 0.6, 0.6),
        "best": (0.9, 0.9, 0.9),
    }
    rows = [
        ("m", "main", 1, 0.5, "score", task, rule, value)
        for rule, points in values.items()
        for task, value in zip("ABC", points, strict=True)
    ]
    (sentence,) = findings.describe_rules(rows_of(rows))
    assert "over 3 tasks: min-dime +10.0 (+7.5 to +12.5), min-lidar 0.0 (−24.8 to +24.8)" in sentence
    assert sentence.endswith("The claim holds here.")
