"""The numbers of `compare` and `correlate`, and their intervals, worked out again with numpy."""

from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import transformers as tf
from numpy.typing import NDArray
from polars.testing import assert_frame_equal

from midlayer_encoders import LayerEncoder
from midlayer_encoders.comparing.compare import random_halves
from midlayer_encoders.comparing.correlation import correlate, shifted_curves
from midlayer_encoders.encoder.whole_model import measure
from midlayer_encoders.metrics.text_views import augment
from tests.selection.frames import frame
from tests.support.families import VOCAB
from tests.support.grouped import compare
from tests.support.tiny_folders import save_tiny, tokenizer

WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heath",
    "islet",
    "jetty",
    "knoll",
    "ledge",
    "marsh",
]
TEXTS = [f"{WORDS[n]} {WORDS[(n + 5) % 13]} {WORDS[n][:2]}{n}" for n in range(13)]
METRICS = ["prompt_entropy", "effective_rank", "lidar"]
OPTIONS: dict[str, Any] = {"texts": TEXTS, "metrics": METRICS, "views": 2, "seed": 3, "resamples": 4, "device": "cpu"}
OWN: dict[str, Any] = {"norm": "final", "pooling": "last"}
HOW: dict[str, Any] = {"layers": [1, -1], **OWN}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [save_tiny("Llama", folder / name, seed=seed) for seed, name in enumerate(("first", "second", "third"))]


# --- compare --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_option_of_a_comparison_reaches_every_model(models: list[str]) -> None:
    options = OPTIONS | HOW | {"texts": TEXTS[:10], "layers": [1, -1], "dtype": "float16", "max_length": 7}
    actual = compare(*models[:2], **options, dataset="mine").frame
    for folder in models[:2]:
        encoder = LayerEncoder(folder, -1, device="cpu", dtype="float16", max_length=7, **OWN)
        separate = measure(encoder, TEXTS[:10], metrics=METRICS, views=2, seed=3, dataset="mine", layers=[1, -1])
        own_rows = actual.filter(model=f"local/{Path(folder).name}")
        assert_frame_equal(own_rows, separate, check_row_order=False, rel_tol=1e-5)
    assert actual["model"].unique(maintain_order=True).to_list() == ["local/first", "local/second"]


@pytest.mark.slow
def test_differences_are_from_the_first_model_and_their_intervals_from_the_same_halves(models: list[str]) -> None:
    """Thirteen texts, so that a half is six and the rest seven; each half is measured as if it were all."""
    result = compare(*models, **OPTIONS, **HOW, confidence=0.8)
    views = augment(TEXTS, views=2, seed=3)
    halves = random_halves(len(TEXTS), 4, seed=3).tolist()
    encoders = [LayerEncoder(folder, -1, device="cpu", **OWN) for folder in models]
    measured = [_on(encoders, sample, views) for sample in (range(len(TEXTS)), *halves)]
    assert set(result.differences["base"]) == {"local/first"}
    assert result.differences["model"].unique(maintain_order=True).to_list() == ["local/second", "local/third"]
    scale = NormalDist().inv_cdf(0.9) * np.sqrt(6 / 7)
    for row in result.differences.iter_rows(named=True):
        name = row["model"].removeprefix("local/")
        key = (row["layer"], row["name"])
        changes = np.array([values[name][key] - values["first"][key] for values in measured])
        wide = scale * changes[1:].std(ddof=1)
        expected = (changes[0], changes[0] - wide, changes[0] + wide)
        assert (row["difference"], row["low"], row["high"]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert len(result.differences) == 2 * 2 * len(METRICS)


def _on(
    models: Sequence[LayerEncoder], sample: Sequence[int], views: Sequence[Sequence[str]]
) -> dict[str, dict[Any, float]]:
    """Return the value of each model, layer and metric on some of the texts and their views."""
    actual = {}
    for encoder in models:
        item = measure(
            encoder, [TEXTS[k] for k in sample], metrics=METRICS,
            views=[[view[k] for k in sample] for view in views], layers=[1, -1],
        )  # fmt: skip
        actual[encoder.spec.model.removeprefix("local/")] = {
            (row[0], row[1]): row[2] for row in item.select("layer", "name", "value").rows()
        }
    return actual


@pytest.mark.long
def test_text_of_one_token_is_excluded_from_token_means(models: list[str]) -> None:
    options = OPTIONS | {"metrics": ["prompt_entropy", "curvature"], "texts": [*TEXTS, "x"]}
    actual = compare(*models[:2], **options).frame.filter(model="local/first")
    separate = measure(
        LayerEncoder(models[0], -1, device="cpu"), [*TEXTS, "x"], metrics=["prompt_entropy", "curvature"]
    )
    assert_frame_equal(actual, separate, check_row_order=False, rel_tol=1e-5)
    without = measure(LayerEncoder(models[0], -1, device="cpu"), TEXTS, metrics="prompt_entropy")
    assert_frame_equal(actual.filter(name="prompt_entropy"), without, rel_tol=1e-4)


def test_models_of_different_depth_are_compared_at_equal_depth(models: list[str], tmp_path: Path) -> None:
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    tf.LlamaModel(config).save_pretrained(tmp_path / "small")
    tokenizer().save_pretrained(tmp_path / "small")
    result = compare(models[0], str(tmp_path / "small"), **(OPTIONS | {"metrics": ["first_token_share"]}))
    pairs = result.differences.select("base_layer", "layer", "depth").rows()
    assert pairs == [(0, 0, 0.0), (2, 1, 0.5), (4, 2, 1.0)]


def test_halves_have_half_of_the_texts_once_each_in_every_order() -> None:
    halves = random_halves(13, 200, seed=1)
    assert halves.shape == (200, 6)
    rest = [set(range(13)) - set(half) for half in halves.tolist()]
    assert {len(item) for item in rest} == {7}
    times = torch.bincount(halves.flatten(), minlength=13)
    assert times.min() > 60, "every text is in about 92 of them"
    assert times.max() < 125
    assert len({tuple(sorted(half)) for half in halves.tolist()}) > 150


# --- correlate ------------------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(5)
METRIC, SCORE = RANDOM.normal(size=11).round(1), RANDOM.normal(size=11).round(1)


def spearman(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Pearson's correlation of ranks, equal values sharing the mean of theirs."""
    ranks = [
        np.array([(value < values).sum() + ((value == values).sum() + 1) / 2 for value in values]) for values in (x, y)
    ]
    return float(np.corrcoef(*(-rank for rank in ranks))[0, 1])


def kendall(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Tau-b: pairs in the same order less pairs in the other, over those without ties in each."""
    pairs = [(i, j) for i in range(len(x)) for j in range(i)]
    signs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i, j in pairs]
    combined = sum(a * b for a, b in signs)
    return float(combined / np.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs)))


def distance(x: NDArray[Any], y: NDArray[Any]) -> float:
    """Székely's distance correlation, from doubly centered distances."""
    centered = []
    for values in (x, y):
        far = np.abs(values[:, None] - values)
        centered.append(far - far.mean(0) - far.mean(1)[:, None] + far.mean())
    a, b = centered
    return float(np.sqrt((a * b).mean() / np.sqrt((a * a).mean() * (b * b).mean())))


def shifted_by_hand(curve: NDArray[Any]) -> list[list[float]]:
    """The curve walked again from its start: its steps from each layer on, around the end, in both directions."""
    steps = [float(after - before) for before, after in zip(curve, curve[1:], strict=False)]
    curves = []
    for order in (steps, steps[::-1]):
        for start in range(len(steps)):
            place, walked = float(curve[0]), [float(curve[0])]
            for step in order[start:] + order[:start]:
                place += step
                walked.append(round(place, 9))  # a place that is reached twice ties
            curves.append(walked)
    return curves


def test_shifted_curves_match_the_definition() -> None:
    actual = shifted_curves(METRIC) * np.ptp(METRIC)
    expected = np.array(shifted_by_hand(METRIC))
    np.testing.assert_allclose(actual - actual[:, :1], expected - expected[:, :1], atol=1e-9)
    np.testing.assert_allclose(np.ptp(actual[:, [0, -1]], axis=1), abs(METRIC[-1] - METRIC[0]), atol=1e-9)
    with_ties = shifted_curves(np.array([0.1, 0.3, 0.1, 0.4]))
    assert len(np.unique(with_ties[0])) == 3, "rounding errors must not break ties"


def test_correlate_p_is_the_share_of_shifts_that_reach_the_value() -> None:
    actual = correlate(frame({"dime": METRIC.tolist()}, {"A": SCORE.tolist()}, num_layers=10)).filter(task="A")
    for name, function in (("spearman", spearman), ("kendall", kendall), ("dcor", distance), ("signed_dcor", distance)):
        row = actual.row(by_predicate=pl.col("statistic") == name, named=True)
        reached = [abs(function(np.array(curve), SCORE)) for curve in shifted_by_hand(METRIC)]
        assert abs(row["value"]) == pytest.approx(reached[0])
        assert row["p"] == sum(value >= reached[0] - 1e-9 for value in reached) / 20
        assert row["threshold"] == pytest.approx(max(reached[1:])), "20 shifts: one may reach it"
        assert (row["p"] <= 0.05) == (abs(row["value"]) > row["threshold"])


def test_correlate_related_curves_stand_out_from_11_layers_on() -> None:
    for layers, threshold in ((7, False), (10, False), (11, True), (31, True)):
        curve = np.random.default_rng(layers).normal(size=layers).tolist()
        actual = correlate(frame({"dime": curve}, {"A": curve}, num_layers=layers - 1)).filter(statistic="dcor")
        assert actual["p"].to_list() == [1 / (2 * (layers - 1))] * 2
        assert actual["threshold"].is_not_null().to_list() == [threshold] * 2


@pytest.mark.long
@pytest.mark.parametrize("layers", [7, 13])
def test_correlate_independent_walks_stand_out_at_most_at_the_level(layers: int) -> None:
    generator = np.random.default_rng(layers)
    walks = generator.normal(size=(2, 200, layers)).cumsum(axis=2)
    frames = [
        frame({"dime": x}, {"A": y}, model=f"m{index}", num_layers=layers - 1)
        for index, (x, y) in enumerate(walks.swapaxes(0, 1).tolist())
    ]
    actual = correlate(frames).filter(task="A")
    for (_,), rows in actual.group_by("statistic"):
        for level in (0.05, 0.1, 0.2):
            bound = level + 3 * (level * (1 - level) / len(rows)) ** 0.5  # three standard errors
            assert (rows["p"] <= level).mean() <= bound


def test_models_revisions_and_metrics_do_not_mix_and_values_that_are_not_finite_are_left_out() -> None:
    rows = {key: RANDOM.normal(size=11) for key in ("m", "n", "late")}
    frames = [frame({"dime": METRIC.tolist(), "lidar": values.tolist()}, {"A": SCORE.tolist()}, model=key, num_layers=10)
              for key, values in rows.items()]  # fmt: skip
    frames[2] = frames[2].with_columns(model=pl.lit("m"), revision=pl.lit("step5"))
    frames[1] = frames[1].with_columns(
        value=pl.when((pl.col("layer") == 4) & (pl.col("name") == "lidar")).then(np.inf).otherwise("value")
    )
    actual = correlate(frames).filter(task="A", statistic="kendall", metric="lidar")
    assert actual.select("model", "revision", "metric", "layers").rows() == [
        ("m", "main", "lidar", 11),
        ("n", "main", "lidar", 10),
        ("m", "step5", "lidar", 11),
    ]
    saved = [k for k in range(11) if k != 4]
    expected = [kendall(rows["m"], SCORE), kendall(rows["n"][saved], SCORE[saved]), kendall(rows["late"], SCORE)]
    assert actual["value"].to_list() == pytest.approx(expected)
