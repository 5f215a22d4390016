"""``measure`` compared with every metric computed by hand from single-layer encoders: which states, which order."""

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
from midlayer_encoders.metrics import METRICS
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.metrics.text_views import augment, drop_words
from tests.support.progress import num_tokens, record_steps
from tests.support.tiny_folders import Folder

DRAW = random.Random(3)
TEXTS = ["".join(DRAW.choices("abcdefghijklm nopq rst", k=length)).strip() for length in range(8, 50, 2)]
TEXTS = DRAW.sample([*TEXTS, "ab", "xyz", "Is it?"], 24)  # two too short for halves, one too short for an angle
VIEWS = augment(TEXTS, views=3, seed=4)

encoder = partial(LayerEncoder, device="cpu", dtype="float64")


def layer_values(frame: pl.DataFrame, name: str) -> dict[int, float]:
    rows = frame.filter(name=name)
    assert rows["layer"].is_unique().all()
    return dict(zip(rows["layer"], rows["value"], strict=True))


def token_states(folder: str, layer: int) -> list[Tensor]:
    return encoder(folder, layer, norm="none").encode(TEXTS, output_value="token_embeddings")


def mean_over_texts(function: Callable[..., Tensor], *states: list[Tensor]) -> float:
    values = torch.stack(
        [function(*(states_of_text[None] for states_of_text in text)).squeeze() for text in zip(*states, strict=True)]
    )
    return float(values.double().nanmean())


def mean_halves(states: list[Tensor]) -> tuple[Tensor, Tensor]:
    long_enough = [tokens for tokens in states if len(tokens) >= 4]
    assert len(long_enough) == len(states) - 2
    first = torch.stack([tokens[: len(tokens) // 2].mean(dim=0) for tokens in long_enough])
    return first, torch.stack([tokens[len(tokens) // 2 :].mean(dim=0) for tokens in long_enough])


def by_hand(
    folder: str, layers: Sequence[int], views: list[list[str]], *, seed: int, **options: Any
) -> dict[str, dict[int, float]]:
    """Return every metric by name and layer; ``options`` apply to the vectors."""
    copies = drop_words(TEXTS, seed=seed)
    expected: dict[str, dict[int, float]] = {name: {} for name in METRICS}
    states_before: list[Tensor] | None = None
    rows_before: Tensor | None = None
    for layer in layers:
        states = token_states(folder, layer)
        layer_encoder = encoder(folder, layer, **options)
        rows, copy_rows, *view_rows = (
            torch.as_tensor(layer_encoder.encode(texts)).float() for texts in (TEXTS, copies, *views)
        )
        for name in ("prompt_entropy", "curvature", "prompt_effective_rank", "first_token_share"):
            expected[name][layer] = mean_over_texts(getattr(of, name), states)
        expected["matrix_entropy"][layer] = float(of.matrix_entropy(torch.cat(states)))
        expected["half_match"][layer] = float(of.half_match(*mean_halves(states)))
        for name in (
            "dataset_entropy",
            "effective_rank",
            "anisotropy",
            "intrinsic_dimension",
            "alpha_req",
            "uniformity",
        ):
            expected[name][layer] = float(getattr(of, name)(rows.double()))
        expected["logdet_entropy"][layer] = float(of.logdet_entropy(rows.double()))
        expected["alignment"][layer] = float(of.alignment(rows.double(), copy_rows.double()))
        expected["infonce"][layer] = float(of.infonce(view_rows[0].double(), view_rows[1].double()))
        expected["dime"][layer] = float(of.dime(view_rows[0].double(), view_rows[1].double()))
        expected["lidar"][layer] = float(of.lidar(torch.stack(view_rows).double()))
        if states_before is not None and rows_before is not None:
            expected["block_influence"][layer] = mean_over_texts(of.block_influence, states_before, states)
            expected["cka"][layer] = float(of.cka(rows_before.double(), rows.double()))
            expected["neighbor_overlap"][layer] = float(of.neighbor_overlap(rows_before.double(), rows.double()))
        states_before, rows_before = states, rows
    return expected


def assert_matches_by_hand(frame: pl.DataFrame, expected: dict[str, dict[int, float]]) -> None:
    assert set(frame["name"]) == set(METRICS)
    for name, by_layer in expected.items():
        assert layer_values(frame, name) == pytest.approx(by_layer, rel=1e-5, abs=1e-6), name
        assert len({round(value, 5) for value in by_layer.values()}) > 1, (
            f"{name}: a mix-up of layers would be detected"
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {"norm": "none", "pooling": "last"}),
        pytest.param("BERT", {"norm": "final", "pooling": "weightedmean"}, marks=pytest.mark.slow),
    ],
)
def test_every_metric_of_every_layer_matches_the_encoder_of_that_layer(
    name: str, options: dict[str, Any], tiny_folder: Folder
) -> None:
    batches: list[int] = []
    full_encoder = encoder(tiny_folder(name), -1, **options)
    progress = record_steps(batches, "measuring")
    frame = measure(full_encoder, TEXTS, metrics="all", views=3, seed=4, token_budget=120, progress=progress)
    assert sum(batches) == num_tokens(full_encoder, TEXTS, drop_words(TEXTS, seed=4), *VIEWS)
    assert len(batches) > 5 * 3, "several batches in each pass"
    assert_matches_by_hand(frame, by_hand(tiny_folder(name), range(5), VIEWS, seed=4, **options))


@pytest.mark.long
def test_passed_views_selected_layers_and_final_norm(tiny_folder: Folder) -> None:
    """Passed views keep their order; a layer is compared with the one listed before it."""
    folder = tiny_folder("Llama")
    passed_views = [
        [f"{text} once more" for text in TEXTS],
        [text[::-1] for text in TEXTS],
        [text.upper() for text in TEXTS],
    ]
    frame = measure(
        encoder(folder, -1), TEXTS, metrics="all", views=passed_views, layers=[-1, 1, 0.5], token_budget=120,
        dataset="mine",
    )  # fmt: skip
    assert_matches_by_hand(frame, by_hand(folder, [1, 2, 4], passed_views, seed=0))
    assert frame.columns == ["model", "revision", "layer", "depth", "kind", "dataset", "name", "value"]
    assert set(frame.select("layer", "depth").unique().iter_rows()) == {(1, 0.25), (2, 0.5), (4, 1.0)}
    assert set(frame.select("revision", "kind", "dataset").unique().iter_rows()) == {("default", "metric", "mine")}
    assert set(frame["model"]) == {encoder(folder, 1).spec.model}


def test_view_pairs_are_the_first_two_views(tiny_folder: Folder) -> None:
    full_encoder = encoder(tiny_folder("Llama"), -1)
    options = {"metrics": ["infonce", "dime"], "layers": [2]}
    three = measure(full_encoder, TEXTS, views=VIEWS, **options)
    assert three.equals(measure(full_encoder, TEXTS, views=VIEWS[:2], **options))
    assert three.equals(measure(full_encoder, TEXTS, views=2, seed=4, **options)), "the views created with that seed"
    assert not three.equals(measure(full_encoder, TEXTS, views=VIEWS[1:], **options))


@pytest.mark.parametrize("layer", [2, -1])
def test_encoder_of_raw_states_has_no_layer_beyond_its_own(layer: int, tiny_folder: Folder) -> None:
    raw, normed = (encoder(tiny_folder("Llama"), layer, norm=norm) for norm in ("none", "final"))
    options: dict[str, Any] = {"metrics": ["curvature", "dataset_entropy"]}
    frame = measure(raw, TEXTS, **options)
    assert frame["layer"].max() == raw.layer
    assert frame["depth"].max() == raw.layer / 4
    expected = measure_layers(normed, TEXTS, norm="none", **options)
    assert frame.drop("value").equals(expected.drop("value"))
    torch.testing.assert_close(frame["value"].to_torch(), expected["value"].to_torch())
    assert measure(raw, TEXTS, layers=[-1], **options).equals(frame.filter(layer=raw.layer))


@pytest.mark.long
def test_sample_of_many_texts_depends_on_their_position(tiny_folder: Folder) -> None:
    """The same texts in other batch sizes come in another order and give the same sample."""
    full_encoder = encoder(tiny_folder("Llama"), -1, norm="none")
    many = [f"{n:03d}" + "ab" * (n * 7919 % 5) for n in range(510)]
    passed_views = [[text + " x" for text in many], [("y " * (n % 3)) + text for n, text in enumerate(many)]]
    options = {"metrics": ["lidar"], "layers": [1], "views": passed_views}
    frame = measure(full_encoder, many, **options)
    assert layer_values(frame, "lidar") == pytest.approx(
        layer_values(measure(full_encoder, many, token_budget=500, **options), "lidar")
    )
    layer_encoder = encoder(tiny_folder("Llama"), 1, norm="none")
    rows = torch.stack([torch.as_tensor(layer_encoder.encode(view)).float().double() for view in passed_views])
    metric = of.LiDAR([1], views=2)
    for view in (1, 0):
        metric.update(rows[view], view=view, index=torch.arange(510), layer=1)
    assert layer_values(frame, "lidar")[1] == pytest.approx(float(metric.compute()), rel=1e-5)
    assert abs(layer_values(frame, "lidar")[1] - float(of.lidar(rows))) > 1e-5, "a sample of 500, not all"
