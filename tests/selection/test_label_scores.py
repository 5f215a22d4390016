"""Scores on labels, end to end: the layer where they can be read, on the vectors that ``encode`` gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.sentence_transformers_encoder import select_layer
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.selection import LabelEvidence, Selection, select
from midlayer_encoders.selection.ridge import ridge_correct
from tests.progress import record_steps

Folder = Callable[[str], str]
LAYERS = range(5)


def ordered(pairs: int) -> tuple[list[str], list[str]]:
    """Return letters in the order of the alphabet and the same ones backwards, of mixed lengths, and which is which.

    The mean of a text's token embeddings is that of its twin, so only what attention adds can tell them apart.
    """
    draw = random.Random(0)
    texts: list[str] = []
    for _ in range(pairs):
        letters = "".join(sorted(draw.sample("abcdefghijklmnopqrstuvwxyz", draw.choice([6, 9, 14]))))
        texts += [letters, letters[::-1]]
    return texts, ["up", "down"] * pairs


TEXTS, ORDER = ordered(40)
SHUFFLED = random.Random(1).sample(ORDER, len(ORDER))
SECOND = ["even" if ord(text[1]) % 2 == 0 else "odd" for text in TEXTS]
"""Hard to read off any vector, so that every layer, prompt, norm and pooling has a score of its own."""


def encoder(folder: str, layer: int = -1, **options: Any) -> LayerEncoder:
    """Return an encoder in double precision: no text lies so near the border that a rounding moves it."""
    return LayerEncoder(folder, layer, device="cpu", dtype="float64", **options)


def scores(made: Selection) -> np.ndarray:
    rows = made.frame.filter(kind="score").sort("layer")
    assert rows["layer"].to_list() == list(LAYERS)
    assert rows["depth"].to_list() == [layer / 4 for layer in LAYERS]
    assert set(rows["name"]) == {"accuracy"}
    return rows["value"].to_numpy()


def right_by_hand(folder: str, texts: list[str], labels: list[str], *, seed: int = 0, **options: Any) -> np.ndarray:
    """Return how often each layer's own encoder labels each text rightly over three ways to deal the folds, (L, N)."""
    classes = torch.tensor([sorted(set(labels)).index(label) for label in labels])
    vectors = torch.stack([torch.as_tensor(encoder(folder, layer, **options).encode(texts)) for layer in LAYERS])
    draws = [ridge_correct(vectors, classes, seed=seed + draw) for draw in range(3)]
    return torch.stack(draws).double().mean(dim=0).numpy()


def smoothed_best(accuracy: np.ndarray) -> int:
    """Return the layer whose mean with its neighbours, itself counted twice, is highest; of equals the lowest."""
    means = []
    for layer in range(len(accuracy)):
        near = accuracy[max(0, layer - 1) : layer + 2]
        means.append((near.sum() + accuracy[layer]) / (len(near) + 1))
    return int(np.argmax(means))


@pytest.mark.parametrize("choose", [select, select_layer])
def test_labels_are_found_at_the_layer_where_they_can_be_read(choose: Any, tiny_folder: Folder) -> None:
    whole = encoder(tiny_folder("Llama"))
    with torch.no_grad():  # the first block mixes no tokens: order is seen from the second on
        whole[0].model.layers[0].self_attn.o_proj.weight.zero_()
    found = choose(whole, TEXTS, ORDER, rule="few-labels")
    accuracy = scores(found)
    assert (accuracy[:2] < 0.55).all(), accuracy
    assert (accuracy[2:] > 0.75).all(), accuracy
    assert found.layer in (2, 3, 4)
    assert found.layer == smoothed_best(accuracy)


def test_labels_in_the_letters_are_read_at_every_layer_and_shuffled_ones_at_none(tiny_folder: Folder) -> None:
    whole = encoder(tiny_folder("Llama"))
    texts = [f"{'abcdefgh'[n % 8] * 3}{'mnop'[n % 4] * (n % 5)}" if n % 2 else f"{n} {n + 7}" for n in range(40)]
    letters = ["letters" if text[0].isalpha() else "digits" for text in texts]
    assert (scores(select(whole, texts, letters)) > 0.97).all()
    assert (abs(scores(select(whole, TEXTS, SHUFFLED)) - 0.5) < 0.15).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("Llama", {"prompts": {"q": "is it up? "}, "default_prompt_name": "q"}, marks=pytest.mark.slow),
        ("Llama", {"prompts": {"q": "is it up? "}, "default_prompt_name": "q", "pooling": "last", "norm": "none"}),
        # A prompt that is not the default is not put before texts.
        pytest.param("Llama", {"prompts": {"q": "is it up? "}}, marks=pytest.mark.slow),
        ("Llama", {"truncate_dim": 3, "max_length": 8}),
        ("BERT", {"pooling": "cls"}),
    ],
    ids=["prompt", "prompt, last, raw", "no default", "truncated", "cls"],
)
def test_scores_are_those_of_the_vectors_that_encode_gives(
    name: str, options: dict[str, Any], tiny_folder: Folder
) -> None:
    expected = right_by_hand(tiny_folder(name), TEXTS, SECOND, **options).mean(axis=1)
    told: list[int] = []
    found = select(encoder(tiny_folder(name), **options), TEXTS, SECOND, token_budget=100, progress=record_steps(told))
    np.testing.assert_allclose(scores(found), expected, atol=1e-12)
    assert len(set(expected)) > 2, "the layers differ, so that a mix-up shows"
    assert sum(told) == 2 * len(TEXTS)
    assert max(told) <= 100 // 6, "batches within the budget, of texts that have six tokens or more"


def test_a_prompt_hides_the_first_letter_from_cls(tiny_folder: Folder) -> None:
    plain = encoder(tiny_folder("Llama"), pooling="cls")
    prompted = encoder(tiny_folder("Llama"), pooling="cls", prompts={"q": "q: "}, default_prompt_name="q")
    assert scores(select(plain, TEXTS, ORDER)).min() > 0.85
    assert scores(select(prompted, TEXTS, ORDER)).max() <= 0.5, "a causal model's first token is the prompt's"


def evidence_by_hand(right: np.ndarray, layer: int, seed: int) -> LabelEvidence:
    """Return what 1000 draws of as many texts say, each counted text by text."""
    count = right.shape[1]
    drawn = torch.randint(count, (1000, count), generator=torch.Generator().manual_seed(seed)).numpy()
    means = np.stack([right[:, places].mean(axis=1) for places in drawn])  # (R, L)
    gains = np.sort(100 * (means[:, layer] - means[:, -1]))
    layers = np.sort([smoothed_best(row) for row in means])
    low, high = (np.interp(share * 999, np.arange(1000), gains) for share in (0.025, 0.975))
    return LabelEvidence(
        count=count,
        layers=(int(layers[round(0.025 * 999)]), int(layers[round(0.975 * 999)])),
        gain=100 * (right[layer].mean() - right[-1].mean()),
        low=low,
        high=high,
    )


@pytest.mark.parametrize(
    ("rule", "seed", "texts", "pooling"),
    [
        pytest.param("few-labels", 0, 80, "cls", marks=pytest.mark.slow),
        ("few-labels", 5, 80, "cls"),
        ("auto", 0, 80, "mean"),
        ("last", 5, 30, "cls"),
    ],
)
def test_evidence_is_the_bootstrap_of_the_chosen_layer_against_the_last(
    rule: str, seed: int, texts: int, pooling: Any, tiny_folder: Folder
) -> None:
    folder = tiny_folder("Llama")
    some, labels = TEXTS[:texts], ORDER[:texts]
    right = right_by_hand(folder, some, labels, seed=seed, pooling=pooling)
    found = select(encoder(folder, pooling=pooling), some, labels, rule=rule, seed=seed)
    best = smoothed_best(right.mean(axis=1))
    # For a rule that reads no labels the evidence is about the layer that the labels would take.
    layer = found.layer if rule == "auto" else best
    assert (layer == best) == (rule != "auto")
    expected = evidence_by_hand(right, layer, seed)
    assert found.labels is not None
    assert found.labels.count == texts
    assert found.labels.layers == expected.layers
    for name in ("gain", "low", "high"):
        assert getattr(found.labels, name) == pytest.approx(getattr(expected, name), abs=1e-9), name
    assert expected.low < expected.gain < expected.high
    assert expected != evidence_by_hand(right, layer, seed + 1), "another seed would show"
    if rule == "few-labels":
        assert found.layer == layer


def test_auto_takes_the_labels_layer_where_97_of_100_draws_prefer_it(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    whole = encoder(folder, pooling="cls")
    without = select(whole, TEXTS).layer
    right = right_by_hand(folder, TEXTS, ORDER, pooling="cls")
    best = smoothed_best(right.mean(axis=1))
    drawn = torch.randint(80, (1000, 80), generator=torch.Generator().manual_seed(0)).numpy()
    ahead = np.array([(right[best, places] - right[without, places]).mean() for places in drawn])
    assert np.quantile(ahead, 0.025) > 0, "sure of it"
    found = select(whole, TEXTS, ORDER)
    assert found.layer == best == 0
    assert f"significantly more than at layer {without}, the choice without labels" in found.reason
    unsure = select(encoder(folder), TEXTS, ORDER)
    assert unsure.layer == without
    assert "few-labels would choose layer 4, but 80 labels are not enough" in unsure.reason


def test_only_some_texts_are_looked_at_and_each_keeps_its_label(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    whole = encoder(folder, pooling="cls")
    labels = [label if place % 4 else None for place, label in enumerate(ORDER)]
    found = select(whole, TEXTS, labels, max_texts=24)
    looked = [TEXTS[80 * place // 24] for place in range(24)]
    metrics = measure_layers(whole, looked, metrics=["half_match", "prompt_entropy", "dataset_entropy"])
    assert found.frame.filter(kind="metric").equals(metrics)
    known = [(text, label) for text, label in zip(TEXTS, labels, strict=True) if label is not None]
    some = [known[60 * place // 24] for place in range(24)]
    right = right_by_hand(folder, [text for text, _ in some], [label for _, label in some], pooling="cls")
    np.testing.assert_allclose(scores(found), right.mean(axis=1), atol=1e-12)
    assert found.labels is not None
    assert found.labels.count == 24


def test_select_layer_hands_every_option_on(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    asked: dict[str, Any] = {"rule": "min-dataset-entropy", "all_rules": True, "max_texts": 24, "seed": 3}
    expected = select(encoder(folder, pooling="cls"), TEXTS, ORDER, **asked)
    found = select_layer(folder, TEXTS, ORDER, **asked, device="cpu", dtype="float64", pooling="cls")
    assert found.frame.equals(expected.frame)
    assert (found.choices, found.labels, found.layer) == (expected.choices, expected.labels, expected.layer)
    assert {"infonce", "dime", "accuracy"} < set(found.frame["name"])


def test_halves_and_prompts_are_measured_where_sixteen_texts_have_four_tokens(tiny_folder: Folder) -> None:
    whole = encoder(tiny_folder("Llama"))
    enough, short = [text[:4] for text in TEXTS[:16]], [text[:3] for text in TEXTS[16:20]]
    every = {"half_match", "prompt_entropy", "dataset_entropy"}
    assert set(select(whole, [*enough, *short]).frame["name"]) == every
    assert set(select(whole, [*enough[1:], *short]).frame["name"]) == {"dataset_entropy"}
