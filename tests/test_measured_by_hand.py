"""``measure`` against every metric computed by hand from the encoders of the single layers: which states, which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

import midlayer_encoders.metrics as of
from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.metrics import METRICS
from midlayer_encoders.views.text_views import augment
from tests.progress import counted

Folder = Callable[[str], str]
DRAW = random.Random(3)
TEXTS = ["".join(DRAW.choices("abcdefghijklm nopq rst", k=length)).strip() for length in range(8, 50, 2)]
TEXTS = DRAW.sample([*TEXTS, "ab", "xyz", "Is it?"], 24)  # two too short for halves, one too short for an angle
VIEWS = augment(TEXTS, views=3, seed=4)

encoder = partial(LayerEncoder, device="cpu", dtype="float64")


def values(frame: pl.DataFrame, name: str) -> dict[int, float]:
    rows = frame.filter(name=name)
    assert rows["layer"].is_unique().all()
    return dict(zip(rows["layer"], rows["value"], strict=True))


def states_of(folder: str, layer: int) -> list[Tensor]:
    return encoder(folder, layer, norm="none").encode(TEXTS, output_value="token_embeddings")


def mean_over_texts(function: Callable[..., Tensor], *states: list[Tensor]) -> float:
    found = torch.stack([function(*(one[None] for one in text)).squeeze() for text in zip(*states, strict=True)])
    return float(found.double().nanmean())


def halves(states: list[Tensor]) -> tuple[Tensor, Tensor]:
    long_enough = [one for one in states if len(one) >= 4]
    assert len(long_enough) == len(states) - 2
    first = torch.stack([one[: len(one) // 2].mean(dim=0) for one in long_enough])
    return first, torch.stack([one[len(one) // 2 :].mean(dim=0) for one in long_enough])


def by_hand(folder: str, layers: Sequence[int], views: list[list[str]], **options: Any) -> dict[str, dict[int, float]]:
    """Return every metric by name and layer; ``options`` are those of the vectors."""
    found: dict[str, dict[int, float]] = {name: {} for name in METRICS}
    states_before: list[Tensor] | None = None
    rows_before: Tensor | None = None
    for layer in layers:
        states = states_of(folder, layer)
        cut = encoder(folder, layer, **options)
        rows, *seen = (torch.as_tensor(cut.encode(texts)).float() for texts in (TEXTS, *views))
        for name in ("prompt_entropy", "curvature", "prompt_effective_rank", "first_token_share"):
            found[name][layer] = mean_over_texts(getattr(of, name), states)
        found["matrix_entropy"][layer] = float(of.matrix_entropy(torch.cat(states)))
        found["half_match"][layer] = float(of.half_match(*halves(states)))
        for name in ("dataset_entropy", "effective_rank", "anisotropy", "intrinsic_dimension", "alpha_req"):
            found[name][layer] = float(getattr(of, name)(rows.double()))
        found["logdet_entropy"][layer] = float(of.logdet_entropy(rows.double()))
        found["infonce"][layer] = float(of.infonce(seen[0].double(), seen[1].double()))
        found["dime"][layer] = float(of.dime(seen[0].double(), seen[1].double()))
        found["lidar"][layer] = float(of.lidar(torch.stack(seen).double()))
        if states_before is not None and rows_before is not None:
            found["block_influence"][layer] = mean_over_texts(of.block_influence, states_before, states)
            found["cka"][layer] = float(of.cka(rows_before.double(), rows.double()))
            found["neighbor_overlap"][layer] = float(of.neighbor_overlap(rows_before.double(), rows.double()))
        states_before, rows_before = states, rows
    return found


def assert_as_by_hand(frame: pl.DataFrame, expected: dict[str, dict[int, float]]) -> None:
    assert set(frame["name"]) == set(METRICS)
    for name, by_layer in expected.items():
        assert values(frame, name) == pytest.approx(by_layer, rel=1e-5, abs=1e-6), name
        assert len({round(value, 5) for value in by_layer.values()}) > 1, f"{name}: a mix-up of layers would show"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {"norm": "none", "pooling": "last"}),
        pytest.param("BERT", {"norm": "final", "pooling": "weightedmean"}, marks=pytest.mark.slow),
    ],
)
def test_every_metric_of_every_layer_is_that_of_the_layers_own_encoder(
    name: str, options: dict[str, Any], tiny_folder: Folder
) -> None:
    batches: list[int] = []
    whole = encoder(tiny_folder(name), -1, **options)
    frame = measure(whole, TEXTS, metrics="all", views=3, seed=4, token_budget=120, progress=counted(batches))
    assert sum(batches) == 4 * len(TEXTS)
    assert len(batches) > 4 * 3, "several batches in each pass"
    assert_as_by_hand(frame, by_hand(tiny_folder(name), range(5), VIEWS, **options))


def test_given_views_some_layers_and_the_final_norm(tiny_folder: Folder) -> None:
    """Views of the caller are taken in their order; a layer is compared with the one listed before it."""
    folder = tiny_folder("Llama")
    given = [[f"{text} once more" for text in TEXTS], [text[::-1] for text in TEXTS], [text.upper() for text in TEXTS]]
    frame = measure(
        encoder(folder, -1), TEXTS, metrics="all", views=given, layers=[-1, 1, 0.5], token_budget=120,
        dataset="mine",
    )  # fmt: skip
    assert_as_by_hand(frame, by_hand(folder, [1, 2, 4], given))
    assert frame.columns == ["model", "revision", "layer", "depth", "kind", "dataset", "name", "value"]
    assert set(frame.select("layer", "depth").unique().iter_rows()) == {(1, 0.25), (2, 0.5), (4, 1.0)}
    assert set(frame.select("revision", "kind", "dataset").unique().iter_rows()) == {("default", "metric", "mine")}
    assert set(frame["model"]) == {encoder(folder, 1).spec.model}


def test_pairs_of_views_are_the_first_two_given(tiny_folder: Folder) -> None:
    whole = encoder(tiny_folder("Llama"), -1)
    asked = {"metrics": ["infonce", "dime"], "layers": [2]}
    three = measure(whole, TEXTS, views=VIEWS, **asked)
    assert three.equals(measure(whole, TEXTS, views=VIEWS[:2], **asked))
    assert three.equals(measure(whole, TEXTS, views=2, seed=4, **asked)), "the views that the seed would make"
    assert not three.equals(measure(whole, TEXTS, views=VIEWS[1:], **asked))


@pytest.mark.parametrize("layer", [2, -1])
def test_an_encoder_of_raw_states_has_no_layer_beyond_its_own(layer: int, tiny_folder: Folder) -> None:
    raw, normed = (encoder(tiny_folder("Llama"), layer, norm=norm) for norm in ("none", "final"))
    asked: dict[str, Any] = {"metrics": ["curvature", "dataset_entropy"]}
    frame = measure(raw, TEXTS, **asked)
    assert frame["layer"].max() == raw.layer
    assert frame["depth"].max() == raw.layer / 4
    same = measure_layers(normed, TEXTS, norm="none", **asked)
    assert frame.drop("value").equals(same.drop("value"))
    torch.testing.assert_close(frame["value"].to_torch(), same["value"].to_torch())
    assert measure(raw, TEXTS, layers=[-1], **asked).equals(frame.filter(layer=raw.layer))


def test_more_texts_than_a_sample_holds_are_drawn_by_their_place(tiny_folder: Folder) -> None:
    """The same texts in batches of other sizes come in another order, and give the same sample."""
    whole = encoder(tiny_folder("Llama"), -1, norm="none")
    many = [f"{n:03d}" + "ab" * (n * 7919 % 5) for n in range(510)]
    given = [[text + " x" for text in many], [("y " * (n % 3)) + text for n, text in enumerate(many)]]
    asked = {"metrics": ["lidar"], "layers": [1], "views": given}
    frame = measure(whole, many, **asked)
    assert values(frame, "lidar") == pytest.approx(values(measure(whole, many, token_budget=500, **asked), "lidar"))
    cut = encoder(tiny_folder("Llama"), 1, norm="none")
    rows = torch.stack([torch.as_tensor(cut.encode(view)).float().double() for view in given])
    metric = of.LiDAR([1], views=2)
    for view in (1, 0):
        metric.update(1, rows[view], view=view, index=torch.arange(510))
    assert values(frame, "lidar")[1] == pytest.approx(float(metric.compute()), rel=1e-5)
    assert abs(values(frame, "lidar")[1] - float(of.lidar(rows))) > 1e-5, "of 500, not of all"
