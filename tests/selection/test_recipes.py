"""Selecting recipe and layer: by labels if they are conclusive, otherwise by the kind of the model."""

import json
import random
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from midlayer_encoders import LayerEncoder, Recipe, select_layer
from midlayer_encoders.cli.find import selection_html
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics.label_accuracy import class_numbers, ridge_correct
from midlayer_encoders.recipes import RECIPES, fitting_recipes, recipes_of
from midlayer_encoders.selection import RULES, Selection, select
from midlayer_encoders.selection.kind import ModelKind
from midlayer_encoders.selection.select import DEFAULTS, LABELS, default_depth, default_recipe
from midlayer_encoders.selection.selection_result import RECORD
from tests.recipes.test_word_echo import save_causal
from tests.selection.frames import frame
from tests.selection.test_select import KINDS, TEXTS
from tests.support.tiny_folders import Folder

YOURS = Recipe(name="yours", template='a "{text}" is:', pooling="last")
ASKED = ["plain", YOURS, "plain+center+normalize"]


@pytest.fixture(scope="module")
def whole(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


@pytest.fixture(scope="module")
def labeled(whole: LayerEncoder) -> Selection:
    reports: list[tuple[str, int, int]] = []
    selection = select(whole, TEXTS, KINDS, recipes=ASKED, progress=lambda *item: reports.append(item))
    assert selection.parts
    assert reports[-1] == ("scoring", 9, 9), "three draws for each recipe"
    assert [done == total for stage, done, total in reports if stage == "labels"][-1]
    return selection


def test_every_layer_of_every_recipe_is_scored_on_the_vectors_of_its_encoder(
    labeled: Selection, whole: LayerEncoder
) -> None:
    classes, _ = class_numbers(KINDS)
    result = {"plain": {}, "yours": {"recipe": YOURS}, "plain+center+normalize": {"center": TEXTS, "normalize": True}}
    assert labeled.frame["recipe"].unique(maintain_order=True).to_list() == list(result)
    for name, options in result.items():
        cut = LayerEncoder(whole.source, 2, device="cpu", **options)  # type: ignore[arg-type]
        vectors = torch.from_numpy(cut.encode(TEXTS))[None]
        right = torch.stack([ridge_correct(vectors, classes, seed=seed) for seed in range(3)]).double().mean()
        row = labeled.frame.filter(kind="score", dataset=LABELS, layer=2, recipe=name)
        assert row["value"].item() == pytest.approx(float(right), abs=0.04), name


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"truncate_dim": 5}, {"normalize": True}])
def test_label_scores_of_centered_spans_are_of_the_encoder(causal_folder: str, options: dict[str, int]) -> None:
    """Some texts have no label, but centers are fitted on them, too."""
    labels = [label if number % 3 else None for number, label in enumerate(KINDS)]
    labeled = [text for text, label in zip(TEXTS, labels, strict=True) if label is not None]
    classes, _ = class_numbers([label for label in labels if label is not None])
    whole = LayerEncoder(causal_folder, -1, device="cpu", **options)
    selection = select(whole, TEXTS, labels, recipes=["word-echo+center", "plain"])
    for layer in (1, 4):
        center = LayerEncoder(causal_folder, layer, recipe="word-echo+center", center=TEXTS, device="cpu", **options)
        vectors = torch.from_numpy(center.encode(labeled))[None]
        right = torch.stack([ridge_correct(vectors, classes, seed=seed) for seed in range(3)]).double().mean()
        row = selection.frame.filter(kind="score", dataset=LABELS, layer=layer, recipe="word-echo+center")
        assert row["value"].item() == pytest.approx(float(right), abs=1e-6)


def test_layer_with_identical_vectors_has_no_score(labeled: Selection) -> None:
    scored = labeled.frame.filter(kind="score", recipe="yours")["layer"].to_list()
    assert scored == [1, 2, 3, 4], "the last token of the template is always the same"


@pytest.mark.parametrize("recipes", [ASKED, [YOURS], "one-word+center"])
def test_keywords_of_the_selection_recreate_the_encoder(whole: LayerEncoder, recipes: list[str | Recipe]) -> None:
    selection = select(whole, TEXTS, recipes=recipes)
    assert selection.parts
    encoder = LayerEncoder(whole.source, device="cpu", **selection.keywords)
    assert encoder.layer == selection.layer
    assert selection.confidence.startswith("Without labels")
    recipe = next(item for item in recipes_of("recipes", recipes) if item.name == selection.recipe)
    center = {"center": TEXTS} if recipe.center else {}
    by_hand = LayerEncoder(whole.source, selection.layer, recipe=recipe, device="cpu", **center)  # type: ignore[arg-type]
    np.testing.assert_array_equal(encoder.encode(TEXTS[:3]), by_hand.encode(TEXTS[:3]))


@pytest.mark.long
def test_conclusive_labels_change_the_recipe(whole: LayerEncoder) -> None:
    end, letters = Recipe(name="end", pooling="last"), random.Random(0)
    texts = ["".join(letters.choices("ab", k=40)) for _ in range(60)]
    sure = select(whole, texts, [text[-1] for text in texts], recipes=["plain", end])
    assert sure.parts
    assert sure.recipe == "end", "a mean of forty letters hardly knows the last"
    scores = sure.frame.filter(kind="score", recipe="end", layer=sure.parts["end"].layer)
    percent = f"{100 * scores['value'].item():.1f}"
    assert f"its accuracy on the labels, {percent}, is significantly more than with plain" in sure.reason
    table = sure.to_frame()
    assert dict(table.select("recipe", "chosen").iter_rows()) == {"plain": False, "end": True}
    assert table.filter(recipe="end")["score"].item() > table.filter(recipe="plain")["score"].item() + 0.2
    assert sure.labels is not None
    assert 0 < sure.labels.low <= sure.labels.gain
    assert "significantly better than the plain text at the last layer" in sure.confidence
    guessed = select(whole, texts, letters.choices("ab", k=60), recipes=["plain", end])
    assert guessed.parts
    assert guessed.recipe == "plain", "labels that say nothing leave the default"


def test_image_model_takes_the_plain_recipe_alone(tiny_folder: Folder) -> None:
    image = LayerEncoder(tiny_folder("ViT"), -1, device="cpu")
    assert select(image, recipes="plain").keywords == {"layer": 3}
    with pytest.raises(OptionError, match=r"does not apply to .*, which takes no text"):
        select(image, recipes="all")


@pytest.mark.parametrize("kind", get_args(ModelKind))
def test_every_kind_has_a_default_and_plain_is_always_included(kind: str) -> None:
    known_values = DEFAULTS[kind]  # type: ignore[index]
    assert "plain" in known_values
    everything = recipes_of("recipes", "all")
    assert default_recipe(everything, kind).name == next(iter(known_values))  # type: ignore[arg-type]
    assert default_recipe([YOURS], kind) == YOURS, "the first if none is known"  # type: ignore[arg-type]
    for recipe in everything:
        assert 0 < default_depth(recipe, kind) <= 1  # type: ignore[arg-type]


def test_frame_of_several_recipes_is_refused() -> None:
    both = [frame({"dime": [1.0] * 9}).with_columns(recipe=pl.lit(name)) for name in ("plain", "one-word")]
    with pytest.raises(OptionError, match=r"one recipe here, .* Filter it first: frame\.filter\(recipe='plain'\)"):
        select_layer(pl.concat(both))


def test_selection_has_a_readable_text(labeled: Selection) -> None:
    words = str(labeled)
    assert words.startswith(f"Layer {labeled.layer} of 4 of {labeled.label}, by recipe {labeled.recipe}: ")
    assert all(name in words for name in labeled.parts)
    assert labeled.labels is not None
    assert labeled.confidence.startswith("On 20 labeled texts it is ")
    assert set(labeled.parts) == {"plain", "yours", "plain+center+normalize"}
    assert all(isinstance(part, Selection) for part in labeled.parts.values())
    assert labeled.plot().axes


def test_unused_arguments_are_refused(whole: LayerEncoder) -> None:
    for options in ({"rule": "last"}, {"all_rules": True}):
        with pytest.raises(OptionError, match="has no effect with `recipes`"):
            select(whole, TEXTS, recipes="all", **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="has no effect with a frame"):
        select(frame({"dime": [1.0] * 9}), recipes="all")
    with pytest.raises(OptionError, match="Did you mean 'one-word'"):
        select(whole, TEXTS, recipes=["one-wrod"])
    with pytest.raises(
        OptionError, match=r"`texts` must hold 16 different texts or more.*'one-word\+center'.*but got 3"
    ):
        select_layer(whole, ["a", "b", "c"], recipes=["plain", "one-word+center"])


@pytest.mark.long
def test_model_saved_without_the_head_of_its_pretraining_keeps_its_last_layer(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    """Half match says nothing about many embedding models, of which 0.8 of the depth would cost points."""
    folder = tiny_folder("BERT")
    headless = select_layer(folder, TEXTS, device="cpu")
    assert headless.layer == headless.num_layers
    assert headless.reason == "the last layer of an embedding model"
    assert headless.kind is not None
    assert headless.kind.evidence == "it was saved as BertModel, without the head of its pretraining"
    shutil.copytree(folder, tmp_path / "masked")
    config = json.loads((tmp_path / "masked" / "config.json").read_text())
    (tmp_path / "masked" / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    assert select_layer(str(tmp_path / "masked"), TEXTS, device="cpu").layer < headless.num_layers
    LayerEncoder(folder, 3, device="cpu").save_pretrained(str(tmp_path / "cut"))
    cut = select_layer(str(tmp_path / "cut"), TEXTS, device="cpu")
    assert (cut.layer, cut.num_layers) == (3, 3)
    assert cut.kind is not None
    assert cut.kind.evidence == "its folder has modules of sentence-transformers"
    labeled = select_layer(folder, TEXTS, KINDS, device="cpu")
    assert labeled.layer == labeled.num_layers or "significantly more" in labeled.reason


@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a causal model with room for the text twice."""
    return save_causal("byte level", tmp_path_factory.mktemp("causal"))


@pytest.mark.long
def test_causal_model_is_read_twice_by_default(causal_folder: str) -> None:
    selection = select_layer(causal_folder, TEXTS, device="cpu")
    assert selection.parts
    assert selection.keywords == {"layer": 5, "recipe": "word-echo+center", "center": TEXTS}, "0.95 of 5 blocks"
    assert list(selection.parts) == ["word-echo+center", "plain"]
    assert selection.parts["plain"].layer == 4, "what the plain text alone would have given"
    assert {choice.rule for choice in selection.parts["plain"].choices} == set(RULES)
    tokenizer = AutoTokenizer.from_pretrained(causal_folder)
    before, question, between = 'This sentence : "', '" means in one word:"', '". The rewritten sentence: "'
    parts = [[tokenizer(part)["input_ids"] for part in (before, text, question, between, text)] for text in TEXTS]
    means = {
        "word-echo+center": sum(len(ids) for row in parts for ids in row) / len(TEXTS),
        "plain": sum(len(row[1]) for row in parts) / len(TEXTS),
    }
    assert selection.tokens == pytest.approx(means)
    assert dict(selection.to_frame().select("recipe", "tokens").iter_rows()) == pytest.approx(means)
    ratio = f"{means['word-echo+center'] / means['plain']:.1f}"
    cost = f"The model reads {means['word-echo+center']:.1f} tokens per text, {ratio} times as many as the plain text."
    assert selection.cost == cost
    assert cost in str(selection)
    assert RECORD in selection.confidence
    encoder = LayerEncoder(causal_folder, "auto", texts=TEXTS, device="cpu")
    assert encoder.spec == LayerEncoder(causal_folder, device="cpu", **selection.keywords).spec
    without = LayerEncoder(causal_folder, 5, recipe="word-echo", device="cpu")
    assert LayerEncoder(causal_folder, "auto", device="cpu").spec == without.spec


def test_page_of_a_selection_has_tokens_with_three_digits(causal_folder: str) -> None:
    selection = select(LayerEncoder(causal_folder, -1, device="cpu"), TEXTS)
    cells = selection_html(selection, {}).replace("\N{NO-BREAK SPACE}", " ")
    for tokens in selection.to_frame()["tokens"]:
        assert f"<td>{tokens:.3g}</td>" in cells


@pytest.mark.parametrize("rule", ["auto", "last"])
def test_selection_names_the_model_as_given_and_marks_files_as_code(
    rule: str, causal_folder: str, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(causal_folder, tmp_path / "first run" / "checkpoint-2")
    encoder = LayerEncoder(str(checkpoint), -1, device="cpu")
    assert repr(encoder).startswith("LayerEncoder('first run/checkpoint-2', layer=5 of 5")
    selection = select(encoder, rule=rule)
    assert str(selection).startswith(f"Layer {selection.layer} of 5 of first run/checkpoint-2, by ")
    page = selection_html(selection, {"Python": "print('`')"})
    assert "<h1>Layer 5 of 5 of first run/checkpoint-2</h1>" in page
    assert ("<code>docs/selection.md</code> lists" in page) == (rule == "auto")
    assert page.count("`") == 1, "only in the code"


def test_own_options_or_a_rule_leave_the_recipe_alone(causal_folder: str) -> None:
    for options in ({"recipe": "plain"}, {"pooling": "last"}, {"norm": "none"}):
        encoder = LayerEncoder(causal_folder, "auto", device="cpu", **options)  # type: ignore[arg-type]
        assert encoder.layer == 4, options
        assert encoder.options.template is None
    assert LayerEncoder(causal_folder, "fixed-depth", device="cpu").options.template is None
    own = LayerEncoder(causal_folder, "auto", template='"{text}" is:"', pooling="last", device="cpu")
    assert (own.layer, own.options.template) == (5, '"{text}" is:"'), "0.95 of the depth, as for one-word"


@pytest.mark.parametrize(
    "recipe", ["word-echo", "one-word", "echo", "word-echo/word", "word-echo/echo", "echo+weightedmean"]
)
def test_a_prompt_has_the_same_depth_as_an_option_and_as_a_candidate(causal_folder: str, recipe: str) -> None:
    assert LayerEncoder(causal_folder, "auto", recipe=recipe, device="cpu").layer == 5, "0.95 of 5 blocks"
    assert select_layer(causal_folder, recipes=[recipe], device="cpu").layer == 5


def test_labels_choose_between_word_echo_and_the_plain_text(causal_folder: str) -> None:
    selection = select_layer(causal_folder, TEXTS, KINDS, device="cpu")
    assert selection.parts
    scored = selection.frame.filter(kind="score").group_by("recipe").len()
    assert dict(scored.iter_rows()) == {"word-echo+center": 6, "plain": 6}
    assert selection.recipe == "word-echo+center"
    assert selection.parts["plain"].layer == 4
    score = {
        (recipe, layer): value
        for recipe, layer, value in selection.frame.filter(kind="score").select("recipe", "layer", "value").iter_rows()
    }
    gain = 100 * (score[selection.recipe, selection.layer] - score["plain", 5])
    assert score["plain", 5] != score["plain", 4], "the layer in the sentence matters"
    for recipe, part in selection.parts.items():
        assert part.labels is not None
        assert part.labels.gain == pytest.approx(100 * (score[recipe, part.layer] - score[recipe, 5])), recipe
    assert selection.labels is not None
    assert selection.labels.gain == pytest.approx(gain)
    beginning, against = (
        "On 20 labeled texts it is ",
        f"better than the plain text at the last layer ({gain:+.1f} points, ",
    )
    assert selection.confidence.startswith(beginning)
    assert against in selection.confidence


def test_all_named_recipes_are_those_that_the_model_takes(
    causal_folder: str, tiny_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    selection = select_layer(causal_folder, TEXTS, recipes="all", device="cpu")
    assert selection.parts
    assert set(selection.parts) == set(RECIPES)
    assert selection.recipe == "word-echo"
    encoder = LayerEncoder(tiny_folder("BERT"), -1, device="cpu")
    fitting = fitting_recipes(encoder, recipes_of("recipes", "all"))
    assert {recipe.name for recipe in fitting} == set(RECIPES) - {"word-echo"}
    assert "The recipe word-echo is left out for " in caplog.text
    with pytest.raises(OptionError, match="must leave room for a text"):
        select_layer(encoder, TEXTS, recipes=["plain", "word-echo"])


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(TEXTS[:16], "word-echo+center"), (TEXTS[:15], "word-echo"), (TEXTS[:15] * 2, "word-echo"), (None, "word-echo")],
    ids=["16 texts", "15 texts", "15 texts twice", "no texts"],
)
def test_causal_default_is_centered_on_16_different_texts(
    texts: list[str] | None, expected: str, causal_folder: str
) -> None:
    encoder = LayerEncoder(causal_folder, "auto", texts=texts, device="cpu")
    assert encoder.selection is not None
    assert encoder.selection.recipe == encoder.options.recipe == expected


def test_default_subtracts_the_mean_of_each_span(causal_folder: str, tmp_path: Path) -> None:
    encoder = select_layer(causal_folder, TEXTS, device="cpu").encoder(device="cpu")
    apart = LayerEncoder(causal_folder, 5, recipe="word-echo", join="none", device="cpu").encode(TEXTS)
    spans = apart[:, :-1].reshape(len(TEXTS), 3, -1).astype(np.float64)
    spans -= spans.mean(axis=0)
    spans /= np.linalg.norm(spans, axis=2, keepdims=True)
    expected = np.sqrt(spans.shape[2]) * (apart[:, -1:] * spans[:, 0] + spans[:, 1] + spans[:, 2])
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)
    encoder.save_pretrained(str(tmp_path))
    loaded = SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(loaded.encode(TEXTS), expected, atol=1e-5)


def test_repeated_texts_do_not_change_the_center(causal_folder: str) -> None:
    repeated = LayerEncoder(causal_folder, "auto", texts=TEXTS + TEXTS[:1] * 600, device="cpu")
    expected = LayerEncoder(causal_folder, "auto", texts=TEXTS, device="cpu")
    assert repeated.options.center == expected.options.center == tuple(TEXTS)
    np.testing.assert_array_equal(repeated.encode(TEXTS), expected.encode(TEXTS))


def test_label_scores_of_repeated_texts_are_of_the_encoder(causal_folder: str) -> None:
    """Vectors at the labeled rows are centered on the different texts, as the encoder's are."""
    texts, labels = TEXTS + TEXTS[:1] * 40, [*KINDS, *[None] * 40]
    whole = LayerEncoder(causal_folder, -1, device="cpu")
    expected, repeated = (
        select(whole, each, kinds, recipes=["word-echo+center"]).frame.filter(kind="score", dataset=LABELS)
        for each, kinds in ((TEXTS, KINDS), (texts, labels))
    )
    assert repeated["value"].to_list() == expected["value"].to_list()


def test_recipe_needs_different_texts_to_center_on(whole: LayerEncoder) -> None:
    with pytest.raises(OptionError, match=r"`texts` must hold 16 different texts or more.* but got 1"):
        select_layer(whole, ["a text"] * 16, recipes=["plain", "one-word+center"])


def test_center_of_the_user_replaces_that_of_the_default(causal_folder: str) -> None:
    center = [f"{text} again" for text in TEXTS]
    encoder = LayerEncoder(causal_folder, "auto", texts=TEXTS, center=center, device="cpu")
    expected = LayerEncoder(causal_folder, 5, recipe="word-echo", center=center, device="cpu")
    again = LayerEncoder(causal_folder, encoder.selection, device="cpu")
    for each in (encoder, again):
        np.testing.assert_array_equal(each.encode(TEXTS), expected.encode(TEXTS))


def test_selection_of_texts_without_tokens_has_a_cost(causal_folder: str) -> None:
    assert select_layer(causal_folder, ["", ""], device="cpu").cost == "The model reads 29.0 tokens per text."
