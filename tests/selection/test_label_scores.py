"""Label scores end to end: the layer where labels are readable, on the vectors of ``encode``."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.whole_model import select_layer
from midlayer_encoders.metrics.label_accuracy import ridge_correct
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.selection import LabelEvidence, Selection, select
from tests.support.tiny_folders import Folder

LAYERS = range(5)


def ordered(pairs: int) -> tuple[list[str], list[str]]:
    """Return strings of letters in alphabetical and reversed order, of mixed lengths, and their labels.

    A text and its reverse have the same mean token embedding, so only attention can distinguish them.
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
"""Hard to predict from any vector, so that every layer, prompt, norm and pooling has its own score."""


def encoder(folder: str, layer: int = -1, **options: Any) -> LayerEncoder:
    """Return an encoder in double precision, so that rounding changes no prediction."""
    return LayerEncoder(folder, layer, device="cpu", dtype="float64", **options)


def scores(output: Selection) -> np.ndarray:
    rows = output.frame.filter(kind="score").sort("layer")
    assert rows["layer"].to_list() == list(LAYERS)
    assert rows["depth"].to_list() == [layer / 4 for layer in LAYERS]
    assert set(rows["name"]) == {"accuracy"}
    return rows["value"].to_numpy()


def right_by_hand(folder: str, texts: list[str], labels: list[str], *, seed: int = 0, **options: Any) -> np.ndarray:
    """Return how often each layer's own encoder predicts each label correctly over three fold assignments, (L, N)."""
    classes = torch.tensor([sorted(set(labels)).index(label) for label in labels])
    vectors = torch.stack([torch.as_tensor(encoder(folder, layer, **options).encode(texts)) for layer in LAYERS])
    draws = [ridge_correct(vectors, classes, seed=seed + draw) for draw in range(3)]
    return torch.stack(draws).double().mean(dim=0).numpy()


def smoothed_best(accuracy: np.ndarray) -> int:
    """Return the layer with the highest mean with its neighbors, itself counted twice; the lowest of equals."""
    means = []
    for layer in range(len(accuracy)):
        near = accuracy[max(0, layer - 1) : layer + 2]
        means.append((near.sum() + accuracy[layer]) / (len(near) + 1))
    return int(np.argmax(means))


@pytest.mark.parametrize("choose", [select, select_layer])
def test_labels_select_the_layer_where_they_are_readable(choose: Any, tiny_folder: Folder) -> None:
    complete = encoder(tiny_folder("Llama"))
    with torch.no_grad():  # the first block mixes no tokens, so order is visible from the second on
        complete[0].model.layers[0].self_attn.o_proj.weight.zero_()
    actual = choose(complete, TEXTS, ORDER, rule="few-labels")
    accuracy = scores(actual)
    assert (accuracy[:2] < 0.55).all(), accuracy
    assert (accuracy[2:] > 0.75).all(), accuracy
    assert actual.layer in (2, 3, 4)
    assert actual.layer == smoothed_best(accuracy)


def test_letter_labels_are_readable_at_every_layer_and_shuffled_labels_at_none(tiny_folder: Folder) -> None:
    complete = encoder(tiny_folder("Llama"))
    texts = [f"{'abcdefgh'[n % 8] * 3}{'mnop'[n % 4] * (n % 5)}" if n % 2 else f"{n} {n + 7}" for n in range(40)]
    letters = ["letters" if text[0].isalpha() else "digits" for text in texts]
    assert (scores(select(complete, texts, letters)) > 0.97).all()
    assert (abs(scores(select(complete, TEXTS, SHUFFLED)) - 0.5) < 0.15).all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("Llama", {"prompts": {"q": "is it up? "}, "default_prompt_name": "q"}, marks=pytest.mark.slow),
        ("Llama", {"prompts": {"q": "is it up? "}, "default_prompt_name": "q", "pooling": "last", "norm": "none"}),
        # A prompt that is not the default is not prepended.
        pytest.param("Llama", {"prompts": {"q": "is it up? "}}, marks=pytest.mark.slow),
        ("Llama", {"truncate_dim": 3, "max_length": 8}),
        ("BERT", {"pooling": "cls"}),
    ],
    ids=["prompt", "prompt, last, raw", "no default", "truncated", "cls"],
)
def test_scores_use_the_vectors_of_encode(name: str, options: dict[str, Any], tiny_folder: Folder) -> None:
    expected = right_by_hand(tiny_folder(name), TEXTS, SECOND, **options).mean(axis=1)
    complete = encoder(tiny_folder(name), **options)
    selection = select(complete, TEXTS, SECOND)
    np.testing.assert_allclose(scores(selection), expected, atol=1e-12)
    assert len(set(expected)) > 2, "the layers differ, so that a mix-up shows"


def test_prompt_hides_the_first_letter_from_cls(tiny_folder: Folder) -> None:
    plain = encoder(tiny_folder("Llama"), pooling="cls")
    prompted = encoder(tiny_folder("Llama"), pooling="cls", prompts={"q": "q: "}, default_prompt_name="q")
    assert scores(select(plain, TEXTS, ORDER)).min() > 0.85
    assert scores(select(prompted, TEXTS, ORDER)).max() <= 0.5, "a causal model's first token is the prompt's"


def evidence_by_hand(right: np.ndarray, layer: int, seed: int) -> LabelEvidence:
    """Return the result of 1000 bootstrap draws, counted text by text."""
    count = right.shape[1]
    figure = torch.randint(count, (1000, count), generator=torch.Generator().manual_seed(seed)).numpy()
    means = np.stack([right[:, places].mean(axis=1) for places in figure])  # (R, L)
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "seed", "texts", "pooling"),
    [
        pytest.param("few-labels", 0, 80, "cls", marks=pytest.mark.slow),
        ("few-labels", 5, 80, "cls"),
        ("auto", 0, 80, "mean"),
        ("last", 5, 30, "cls"),
    ],
)
def test_evidence_is_the_bootstrap_of_the_selected_layer_against_the_last(
    rule: str, seed: int, texts: int, pooling: Any, tiny_folder: Folder
) -> None:
    folder = tiny_folder("Llama")
    sample, labels = TEXTS[:texts], ORDER[:texts]
    right = right_by_hand(folder, sample, labels, seed=seed, pooling=pooling)
    selection = select(encoder(folder, pooling=pooling), sample, labels, rule=rule, seed=seed)
    best = smoothed_best(right.mean(axis=1))
    # For a rule without labels, the evidence is about the layer that the labels would select.
    layer = selection.layer if rule == "auto" else best
    assert (layer == best) == (rule != "auto")
    expected = evidence_by_hand(right, layer, seed)
    assert selection.labels is not None
    assert selection.labels.count == texts
    assert selection.labels.layers == expected.layers
    for name in ("gain", "low", "high"):
        assert getattr(selection.labels, name) == pytest.approx(getattr(expected, name), abs=1e-9), name
    assert expected.low < expected.gain < expected.high
    assert expected != evidence_by_hand(right, layer, seed + 1), "another seed would show"
    if rule == "few-labels":
        assert selection.layer == layer


@pytest.mark.long
def test_auto_uses_the_layer_of_the_labels_if_97_of_100_draws_prefer_it(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    complete = encoder(folder, pooling="cls")
    without = select(complete, TEXTS).layer
    right = right_by_hand(folder, TEXTS, ORDER, pooling="cls")
    best = smoothed_best(right.mean(axis=1))
    figure = torch.randint(80, (1000, 80), generator=torch.Generator().manual_seed(0)).numpy()
    ahead = np.array([(right[best, places] - right[without, places]).mean() for places in figure])
    assert np.quantile(ahead, 0.025) > 0, "sure of it"
    selection = select(complete, TEXTS, ORDER)
    assert selection.layer == best == 0
    assert f"significantly more than at layer {without}, the choice without labels" in selection.reason
    unsure = select(encoder(folder), TEXTS, ORDER)
    assert unsure.layer == without
    assert "few-labels would choose layer 4, but 80 labels are not enough" in unsure.reason


def test_sampled_texts_keep_their_labels(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    complete = encoder(folder, pooling="cls")
    labels = [label if place % 4 else None for place, label in enumerate(ORDER)]
    selection = select(complete, TEXTS, labels, max_texts=24, rule="half-match")
    looked = [TEXTS[80 * place // 24] for place in range(24)]
    metrics = measure_layers(complete, looked, metrics=["half_match"])
    assert selection.frame.filter(kind="metric").equals(metrics)
    known_values = [(text, label) for text, label in zip(TEXTS, labels, strict=True) if label is not None]
    sample = [known_values[60 * place // 24] for place in range(24)]
    right = right_by_hand(folder, [text for text, _ in sample], [label for _, label in sample], pooling="cls")
    np.testing.assert_allclose(scores(selection), right.mean(axis=1), atol=1e-12)
    assert selection.labels is not None
    assert selection.labels.count == 24


def test_select_layer_passes_every_option(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    options: dict[str, Any] = {"rule": "min-dataset-entropy", "all_rules": True, "max_texts": 24, "seed": 3}
    expected = select(encoder(folder, pooling="cls"), TEXTS, ORDER, **options)
    selection = select_layer(folder, TEXTS, ORDER, **options, device="cpu", dtype="float64", pooling="cls")
    assert selection.frame.equals(expected.frame)
    assert (selection.choices, selection.labels, selection.layer) == (expected.choices, expected.labels, expected.layer)
    assert {"infonce", "dime", "accuracy"} < set(selection.frame["name"])


def test_halves_and_prompts_are_measured_where_sixteen_texts_have_four_tokens(tiny_folder: Folder) -> None:
    complete = encoder(tiny_folder("Llama"))
    enough, short = [text[:4] for text in TEXTS[:16]], [text[:3] for text in TEXTS[16:20]]
    all_values = {"half_match", "prompt_entropy", "dataset_entropy", "dime", "infonce"}
    assert set(select(complete, [*enough, *short], all_rules=True).frame["name"]) == all_values
    few = select(complete, [*enough[1:], *short], all_rules=True)
    assert set(few.frame["name"]) == all_values - {"half_match", "prompt_entropy"}
