from collections.abc import Sequence

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.selection import RULES, CannotChooseError, choose, curves
from midlayer_encoders.selection.rules import best_layer, metrics_of
from tests.selection.frames import VALLEY, frame

FALLING = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
BUMP = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.6, 0.5]


def layer(rule: str, output: pl.DataFrame) -> int:
    return choose(curves(output), rule)[0]


def test_last_and_fixed_depth_depend_only_on_the_number_of_blocks() -> None:
    result = frame({"dime": VALLEY})
    assert layer("last", result) == 8
    assert layer("fixed-depth", result) == 6, "0.8 of 8 blocks is 6.4"


@pytest.mark.parametrize("name", ["dime", "infonce", "dataset_entropy", "prompt_entropy"])
def test_each_minimum_rule_takes_the_lowest_layer_of_its_metric(name: str) -> None:
    rule = f"min-{name.replace('_', '-')}"
    assert layer(rule, frame({name: VALLEY})) == 2
    assert layer(rule, frame({name: FALLING})) == 8
    assert metrics_of(rule) == (name,)


def test_valley_midpoint_is_between_an_interior_valley_and_the_last() -> None:
    assert layer("valley-midpoint", frame({"prompt_entropy": VALLEY})) == 5
    for curve in (FALLING, FALLING[::-1]):
        with pytest.raises(CannotChooseError, match="needs a valley of prompt_entropy between the ends"):
            layer("valley-midpoint", frame({"prompt_entropy": curve}))
    with pytest.raises(CannotChooseError, match="needs a valley"):
        layer("valley-midpoint", frame({"prompt_entropy": [1.0, 0.95, 0.96, 0.97, 0.97, 0.97, 0.98, 0.99, 1.0]}))


def test_half_match_takes_the_highest_layer() -> None:
    assert layer("half-match", frame({"half_match": BUMP})) == 6


def test_few_labels_takes_the_highest_smoothed_score() -> None:
    assert layer("few-labels", frame(scores={"A": BUMP, "B": BUMP})) == 6
    lucky = [0.1, 0.62, 0.1, 0.4, 0.55, 0.6, 0.55, 0.4, 0.3]
    assert layer("few-labels", frame(scores={"A": lucky})) == 5
    assert layer("few-labels", frame(scores={"A": [0.62, 0.1, *lucky[2:]]})) == 5, "the first has one neighbor"
    assert best_layer({0: 0.5, 1: 0.5}) == 0, "of equal ones the lower costs less"


def test_auto_of_a_frame_without_scores_takes_the_fixed_depth() -> None:
    tuned = [0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.5, 0.8, 0.95]
    assert layer("auto", frame({"half_match": tuned})) == 6, "means over texts have no interval"


def test_auto_uses_scores_if_available() -> None:
    result = frame({"half_match": BUMP}, {"A": FALLING})
    assert choose(curves(result), "auto") == (0, "few-labels: the score on A is highest there, 90.0")


@pytest.mark.parametrize(
    ("measured", "note"),
    [
        (range(9), ""),
        (range(1, 9), ""),  # layer 0 is none of the 8 blocks
        (range(8), " (1 of 8 layers were not measured)"),
        ([0, 2, 4, 8], " (5 of 8 layers were not measured)"),
        ([2, 4, 8], " (5 of 8 layers were not measured)"),
    ],
)
def test_unmeasured_layers_are_counted(measured: Sequence[int], note: str) -> None:
    is_measured = pl.col("layer").is_in(list(measured))
    result = frame({"dime": VALLEY, "half_match": BUMP, "prompt_entropy": VALLEY}).filter(is_measured)
    assert choose(curves(result), "min-dime") == (2, f"dime is lowest there, 1{note}")
    best = max(measured, key=lambda number: BUMP[number])
    assert choose(curves(result), "half-match") == (best, f"half match is highest there, {BUMP[best]:.2f}{note}")
    scored = frame(scores={"A": BUMP}).filter(is_measured)
    layer, reason = choose(curves(scored), "few-labels")
    assert reason == f"the score on A is highest there, {100 * BUMP[layer]:.1f}{note}"
    if 2 not in (min(measured), max(measured)):
        valley = "halfway from the valley of prompt_entropy, layer 2, to the last"
        assert choose(curves(result), "valley-midpoint") == (5, f"{valley}{note}")


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("last", "fixed-depth", "auto")])
def test_rule_names_its_missing_inputs(rule: str) -> None:
    result = frame({"curvature": VALLEY})
    with pytest.raises(CannotChooseError, match=r"^needs "):
        layer(rule, result)


@pytest.mark.parametrize("rule", ["min-dime", "half-match", "few-labels"])
def test_constant_curves_select_nothing(rule: str) -> None:
    result = frame({"dime": [1.0] * 9, "half_match": [0.2] * 9}, {"A": [0.5] * 9})
    with pytest.raises(CannotChooseError, match="needs layers that differ"):
        layer(rule, result)


def test_few_measured_layers_and_unknown_rules_are_refused() -> None:
    result = frame({"dime": VALLEY}).filter(pl.col("layer") < 2)
    with pytest.raises(CannotChooseError, match="needs dime of 3 layers or more, but got 2"):
        layer("min-dime", result)
    with pytest.raises(OptionError, match="Did you mean 'half-match'"):
        layer("halfmatch", result)
    with pytest.raises(OptionError, match="`rule` must be one of"):
        layer("min-dime+infonce", result)


def test_curves_average_over_texts_and_tasks() -> None:
    actual = curves(frame(scores={"A": VALLEY, "B": FALLING}))
    assert actual.score[2] == pytest.approx((1.0 + 0.7) / 2)
    assert actual.num_layers == 8


def test_mixed_and_shallow_frames_are_refused() -> None:
    with pytest.raises(OptionError, match="one model at one revision"):
        curves(pl.concat([frame({"dime": VALLEY}), frame({"dime": VALLEY}, model="other")]))
    cut = frame({"infonce": VALLEY[:5]}, num_layers=4)
    with pytest.raises(OptionError, match="m has 4 and 8 blocks in it: it mixes different encoders"):
        curves(pl.concat([frame({"dime": VALLEY}), cut]))
    with pytest.raises(OptionError, match="3 blocks or more to select a layer, but m has 2"):
        curves(frame({"dime": [1, 2, 3]}, num_layers=2))
    with pytest.raises(OptionError, match="but m has 0"):
        curves(frame({"dime": [1]}))
