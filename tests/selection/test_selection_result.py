"""Selections from a frame: which rows are used, how choices are counted, and the text."""

from dataclasses import replace

import polars as pl

from midlayer_encoders.selection import RULES, LabelEvidence, Selection, select
from tests.selection.frames import VALLEY, frame

RISING = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.3, 0.2]
SCORES = [0.1, 0.2, 0.3, 0.5, 0.6, 0.5, 0.3, 0.2, 0.1]
EVERY = frame(
    {
        "dime": VALLEY,
        "infonce": VALLEY[::-1],
        "dataset_entropy": RISING,
        "prompt_entropy": VALLEY,
        "half_match": RISING,
    },
    {"A": SCORES, "B": SCORES[::-1]},
)
CHOSEN = {
    "last": 8,
    "fixed-depth": 6,  # 0.8 of 8 blocks is 6.4
    "min-dime": 2,
    "min-infonce": 6,
    "min-dataset-entropy": 0,
    "min-prompt-entropy": 2,
    "valley-midpoint": 5,  # halfway from 2 to 8
    "half-match": 6,
    "few-labels": 4,
    "auto": 4,
}


def chosen(output: Selection) -> dict[str, int | None]:
    return {choice.rule: choice.layer for choice in output.choices}


def test_every_rule_selects_a_layer_independently_of_row_order() -> None:
    assert chosen(select(EVERY)) == CHOSEN
    for seed in range(3):
        shuffled = select(EVERY.sample(fraction=1, shuffle=True, seed=seed), rule="half-match")
        assert chosen(shuffled) == CHOSEN
        assert shuffled.layer == 6
    assert list(chosen(select(EVERY))) == list(RULES)


def test_nonfinite_values_count_as_not_measured() -> None:
    result = frame({"dime": [3.0, 2.0, float("nan"), 1.5, float("-inf"), 2.5, 2.6, 2.7, 2.8]})
    selection = select(result, rule="min-dime")
    assert (selection.layer, selection.reason) == (3, "dime is lowest there, 1.5 (2 of 8 layers were not measured)")


def test_missing_last_layers_are_counted_and_depth_is_the_models() -> None:
    selection = select(EVERY.filter(pl.col("layer").is_in([0, 2, 4, 6])), rule="valley-midpoint")
    assert selection.num_layers == 8
    assert (selection.layer, chosen(selection)["last"]) == (5, 8), "halfway to the last of the model, measured or not"
    assert selection.reason.endswith("(5 of 8 layers were not measured)")


def test_lower_of_equal_layers_is_selected() -> None:
    flat = [1.0, 2.0, 3.0, 0.5, 2.0, 0.5, 2.0, 3.0, 1.0]
    actual = chosen(select(frame({"dime": flat, "dataset_entropy": flat, "half_match": flat, "infonce": flat})))
    assert (actual["min-dime"], actual["half-match"]) == (3, 2)


def test_scores_and_metrics_of_one_name_are_separate_and_datasets_are_averaged() -> None:
    score = frame(scores={"A": SCORES}).with_columns(name=pl.lit("dime"))
    selection = select(pl.concat([frame({"dime": [value / 10 for value in VALLEY]}), score]))
    assert (chosen(selection)["min-dime"], chosen(selection)["few-labels"]) == (2, 4)
    other_item = frame({"dime": [9.0, 9.0, 9.0, 0.1, 9.0, 9.0, 9.0, 9.0, 9.0]}).with_columns(dataset=pl.lit("others"))
    actual = select(pl.concat([frame({"dime": VALLEY}), other_item]), rule="min-dime")
    assert (actual.layer, actual.reason) == (3, "dime is lowest there, 0.8"), "(1.5 + 0.1) / 2"


def test_scored_layer_counts_twice_with_its_neighbors() -> None:
    peak_and_plateau = [0.1, 0.4, 0.9, 0.4, 0.1, 0.6, 0.62, 0.6, 0.6]  # 2.6 / 4 against 2.44 / 4; without it, 1.7 / 3
    assert select(frame(scores={"A": peak_and_plateau})).layer == 2
    assert select(frame(scores={"A": [0.1, 0.3, 0.9, 0.3, *peak_and_plateau[4:]]})).layer == 6


def test_valley_must_be_below_both_ends() -> None:
    for ends in ((3.0, 1.05), (1.05, 3.0)):  # a tenth below one end only
        curve = [ends[0], 2.0, 1.0, 1.5, 2.0, 2.5, 2.6, 2.7, ends[1]]
        assert chosen(select(frame({"prompt_entropy": curve})))["valley-midpoint"] is None
    curve = [1.2, 2.0, 1.0, 1.5, 2.0, 2.5, 2.6, 2.7, 1.2]
    assert chosen(select(frame({"prompt_entropy": curve})))["valley-midpoint"] == 5


def test_agreement_counts_rules_within_a_tenth_of_the_depth() -> None:
    curve = [1 - layer / 20 for layer in range(21)]

    def at(layer: int) -> list[float]:
        return [abs(item - layer) + 0.5 for item in range(21)]

    result = frame({"dime": at(14), "infonce": at(12), "half_match": curve}, num_layers=20)
    selection = select(result, rule="min-dime")
    # last 20, fixed-depth 16, infonce 12, half-match 0; `auto` follows another and is not counted
    assert (selection.layer, selection.agreement, selection.spread) == (14, (2, 4), (0, 16))
    assert selection.confidence.startswith("The rules disagree, from layer 0 to layer 16: 2 of 4 other rules")
    near = select(frame({"dime": at(14), "infonce": at(12)}, num_layers=20), rule="min-dime")
    assert near.confidence == "The rules agree: all that apply choose layers 12 to 16."
    apart = select(frame({"dime": at(14), "infonce": at(11)}, num_layers=20), rule="min-dime")
    assert apart.confidence.startswith("The rules disagree, from layer 11 to layer 16: 1 of 3 other rules")


def test_text_about_labels_matches_their_interval() -> None:
    plain = select(EVERY, rule="few-labels")
    sure = replace(plain, labels=LabelEvidence(count=40, layers=(3, 6), gain=5.0, low=0.5, high=9.0))
    assert sure.confidence == (
        "On 40 labeled texts it is significantly better than the last layer (+5.0 points, +0.5 to +9.0); "
        "other samples of as many texts choose layers 3 to 6."
    )
    unsure = replace(plain, labels=LabelEvidence(count=40, layers=(3, 6), gain=5.0, low=-0.5, high=9.0))
    assert "it is not significantly better than the last layer (+5.0 points, -0.5 to +9.0)" in unsure.confidence
    last = replace(sure, layer=8)
    assert "it is the last layer itself" in last.confidence
    assert "labeled" not in replace(sure, rule="min-dime").confidence, "labels say nothing of a rule without them"


def test_table_has_a_row_for_each_rule_with_its_layer() -> None:
    rows = select(EVERY, rule="valley-midpoint").to_frame()
    assert rows.columns == ["model", "revision", "rule", "layer", "depth", "chosen", "reason"]
    assert dict(rows.select("rule", "layer").iter_rows()) == CHOSEN
    assert dict(rows.select("rule", "depth").iter_rows()) == {rule: layer / 8 for rule, layer in CHOSEN.items()}
    assert rows.filter("chosen")["rule"].to_list() == ["valley-midpoint"]
    assert set(rows.select("model", "revision").iter_rows()) == {("m", "main")}


def test_two_tasks_are_averaged_where_both_were_scored() -> None:
    result = frame(scores={"A": SCORES, "B": SCORES[:5] + [0.9] * 4})
    part = result.filter((pl.col("dataset") != "B") | (pl.col("layer") < 5))
    selection = select(part, rule="few-labels")
    assert selection.layer == 4
    assert selection.reason == "the score on 2 tasks is highest there, 60.0 (4 of 8 layers were not measured)"
