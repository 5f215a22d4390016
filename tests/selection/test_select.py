"""Selections from an encoder: measurements, labels, and invalid calls."""

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.whole_model import select_layer
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics.label_accuracy import gain_interval
from midlayer_encoders.selection import RULES, CannotChooseError, Selection, select
from tests.selection.frames import VALLEY, frame

WORDS = ("cats and dogs", "stock markets", "rain in Spain", "card pins", "old books")
TEXTS = [
    f"{opening} {word}, number {n}" for n, opening in enumerate(("about", "on", "of", "more on")) for word in WORDS
]
KINDS = [WORDS[(place + place // 7) % 5] for place in range(20)]
"""Mostly the topic of a text, shifted sometimes, so that no layer is always correct."""


@pytest.fixture(scope="module")
def whole(tiny_folder: Callable[[str], str]) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


@pytest.fixture(scope="module")
def labeled(whole: LayerEncoder) -> Selection:
    return select(whole, TEXTS, KINDS)


def count_tokens(encoder: LayerEncoder, texts: list[str]) -> int:
    return sum(map(len, encoder.tokenizer(texts)["input_ids"]))


def test_select_without_labels_measures_nothing_that_files_tell(tiny_folder: Callable[[str], str]) -> None:
    reports: list[tuple[str, int, int]] = []
    selection = select(
        LayerEncoder(tiny_folder("BERT"), -1, device="cpu"), TEXTS, progress=lambda *item: reports.append(item)
    )
    assert not reports, "nothing is read"
    assert selection.frame.is_empty()
    assert selection.layer == selection.num_layers
    assert [choice.rule for choice in selection.choices] == list(RULES)
    assert selection.kind is not None
    assert str(selection.kind) in str(selection)
    assert len(selection.plot().axes) == 1, "the choices alone"


def test_select_by_a_rule_measures_its_metric_alone(whole: LayerEncoder) -> None:
    reports: list[tuple[str, int, int]] = []
    selection = select(whole, TEXTS, rule="min-dataset-entropy", progress=lambda *item: reports.append(item))
    total = count_tokens(whole, TEXTS)
    assert ("measuring", total, total) in reports
    assert reports[-1] == ("computing", 1, 1)
    assert set(selection.frame["name"]) == {"dataset_entropy"}
    chosen = {choice.rule: choice.layer for choice in selection.choices}
    assert selection.layer == selection.frame.sort("value")["layer"][0] == chosen["min-dataset-entropy"]
    assert chosen["last"] == selection.num_layers == 4
    assert chosen["min-dime"] is chosen["few-labels"] is selection.labels is selection.kind is None


def test_all_rules_measures_what_every_rule_needs(whole: LayerEncoder) -> None:
    selection = select(whole, TEXTS, all_rules=True, rule="min-dime")
    assert set(selection.frame["name"]) == {"dime", "infonce", "dataset_entropy", "prompt_entropy", "half_match"}
    chosen = {choice.rule: choice.layer for choice in selection.choices}
    assert selection.layer == chosen["min-dime"] == selection.frame.filter(name="dime").sort("value")["layer"][0]
    assert chosen["min-infonce"] is not None


def test_select_with_labels_reports_tokens_and_then_scores(whole: LayerEncoder) -> None:
    reports: list[tuple[str, int, int]] = []
    select(whole, TEXTS, KINDS, rule="few-labels", progress=lambda *item: reports.append(item))
    total = count_tokens(whole, TEXTS)
    assert [item for item in reports if item[0] == "labels"][-1] == ("labels", total, total)
    assert [item for item in reports if item[0] == "scoring"] == [("scoring", done, 3) for done in range(4)]


def test_select_without_a_text_is_refused(whole: LayerEncoder) -> None:
    for choose in (select, select_layer):
        with pytest.raises(OptionError, match="`texts` must hold at least one text, but got none"):
            choose(whole, [])


def test_labels_of_some_texts_are_sufficient(whole: LayerEncoder) -> None:
    sample = [kind if place < 10 else None for place, kind in enumerate(KINDS)]
    selection = select(whole, TEXTS, sample, rule="few-labels")
    assert selection.labels is not None
    assert selection.labels.count == 10


def test_auto_follows_labels_only_if_they_are_conclusive() -> None:
    better = torch.tensor([[1.0] * 30 + [0.0] * 10, [1.0] * 10 + [0.0] * 30])
    assert gain_interval(better[0], better[1])[0] > 0
    assert gain_interval(better[1], better[0])[0] < 0
    assert gain_interval(better[0, 8:12], better[1, 8:12])[0] <= 0, "four texts are too few"


def test_uninformative_labels_leave_the_default_in_place(whole: LayerEncoder) -> None:
    easy = [text for word in WORDS[:2] for text in [word] * 10]
    selection = select(whole, easy, [text[0] for text in easy])
    assert set(selection.frame.filter(kind="score")["value"]) == {1.0}
    assert selection.layer == select(whole, easy).layer
    assert selection.reason.endswith("all layers have the same accuracy on the labels")


def test_too_few_texts_leave_only_rules_without_measurements(whole: LayerEncoder) -> None:
    selection = select(whole, TEXTS[:6], all_rules=True)
    assert selection.layer == 3
    assert {choice.reason for choice in selection.choices if choice.rule == "half-match"} == {
        "needs 16 different texts or more, but got 6"
    }
    assert selection.confidence.startswith("No layer was measured")
    with pytest.raises(
        CannotChooseError, match=r"'min-dime' cannot choose .* needs 16 different texts or more, but got none"
    ):
        select(whole, rule="min-dime")
    with pytest.raises(CannotChooseError, match="needs 16 texts of 4 tokens or more, but got 0"):
        select(whole, [chr(97 + number) for number in range(20)], rule="half-match")


def test_select_layer_accepts_a_folder_an_encoder_or_a_frame(whole: LayerEncoder, labeled: Selection) -> None:
    assert select_layer(whole, TEXTS, KINDS).choices == labeled.choices
    assert select_layer(whole.source, TEXTS, KINDS, device="cpu").choices == labeled.choices
    assert select_layer(frame({"dime": VALLEY}), rule="min-dime").layer == 2
    with pytest.raises(OptionError, match="`device` cannot be combined with an encoder"):
        select_layer(whole, device="cpu")


def test_selection_as_text_and_as_a_frame(labeled: Selection) -> None:
    words = str(labeled)
    assert words.startswith(f"Layer {labeled.layer} of 4 of Llama")
    assert f"On {20} labeled texts it " in words
    assert all(rule in words for rule in RULES)
    table = labeled.to_frame()
    assert table.filter(pl.col("chosen"))["rule"].to_list() == ["auto"]
    assert table.filter(rule="last")["depth"].to_list() == [1.0]
    low, high = labeled.spread
    assert low <= labeled.layer <= high
    near, remaining = labeled.agreement
    assert 0 <= near <= remaining == sum(choice.layer is not None for choice in labeled.choices) - 1
    panels = labeled.plot().axes
    assert panels[0].get_title(loc="left") == f"layer {labeled.layer}, by auto"
    assert len(panels) == 1 + 1


def test_invalid_input_is_refused(whole: LayerEncoder, tiny_folder: Callable[[str], str]) -> None:
    with pytest.raises(OptionError, match="2 classes or more"):
        select(whole, TEXTS, ["one"] * 20)
    with pytest.raises(OptionError, match="at least 10 for 5 folds, but there are 4"):
        select(whole, TEXTS, KINDS[:4] + [None] * 16)
    with pytest.raises(OptionError, match="one for each text, None for a text without, but got 3 labels and 20 texts"):
        select(whole, TEXTS, KINDS[:3])
    with pytest.raises(OptionError, match="`texts` and `labels` must be None with a frame"):
        select(frame({"dime": VALLEY}), TEXTS)
    with pytest.raises(OptionError, match=r"cut at layer 2 of 4\. Make it with layer=-1"):
        select(LayerEncoder(tiny_folder("Llama"), 2, device="cpu"), TEXTS)


def test_single_string_is_not_a_list_of_texts(whole: LayerEncoder) -> None:
    with pytest.raises(OptionError, match=r"must be a list of texts, but got one: 'texts\.txt'"):
        select(whole, "texts.txt")


@pytest.mark.parametrize("texts", [[*TEXTS, None], ["a text", 2]])
def test_texts_that_are_not_strings_are_refused(whole: LayerEncoder, texts: Any) -> None:
    with pytest.raises(OptionError, match=rf"`texts\[{len(texts) - 1}\]` must be a string, but got"):
        select(whole, texts)


def test_empty_texts_are_refused(whole: LayerEncoder) -> None:
    with pytest.raises(OptionError, match="`max_texts` must be a whole number, 1 or more, but got 0"):
        select(whole, TEXTS, max_texts=0)


def test_identical_texts_are_reported(whole: LayerEncoder) -> None:
    selection = select(whole, ["the same text"] * 20, all_rules=True)
    words = "needs 16 different texts or more, but got 1"
    reasons = {choice.rule: choice.reason for choice in selection.choices}
    assert {reasons[rule] for rule in ("half-match", "valley-midpoint", "min-dime", "min-dataset-entropy")} == {words}
    with pytest.raises(CannotChooseError, match=words):
        select(whole, ["the same text"] * 20, rule="half-match")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "a"}, "`seed` must be a whole number from 0"),
        ({"all_rules": "no"}, "`all_rules` must be True or False, but got 'no'"),
        ({"rule": None}, "`rule` must be one of"),
        ({"labels": "ab"}, "`labels` must be a list of labels"),
        ({"labels": [{}] * 20}, r"`labels\[0\]` must be the name or the number of a class, but got {}"),
    ],
)
def test_options_of_the_wrong_type_are_refused(whole: LayerEncoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        select(whole, TEXTS, **options)


def test_options_without_effect_on_a_frame_are_refused(whole: LayerEncoder) -> None:
    measured = select(whole, TEXTS, rule="half-match").frame
    assert select(measured, rule="half-match").layer == select(whole, TEXTS, rule="half-match").layer
    for options in ({"all_rules": True}, {"max_texts": 9}):
        with pytest.raises(OptionError, match="has no effect with a frame, of which nothing is measured"):
            select(measured, **options)  # type: ignore[arg-type]
