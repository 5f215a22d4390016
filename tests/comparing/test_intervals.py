"""The numbers of `compare` and `correlate`, and their intervals, worked out again with numpy."""

from __future__ import annotations

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
from scipy.stats import kendalltau, spearmanr

from midlayer_encoders import LayerEncoder
from midlayer_encoders.comparing.compare import random_halves
from midlayer_encoders.comparing.correlation import correlate
from midlayer_encoders.encoder.sentence_transformers_encoder import measure
from midlayer_encoders.views.text_views import augment
from tests.families import VOCAB
from tests.grouped import compare
from tests.selection.frames import frame
from tests.tiny_folders import save_tiny, tokenizer

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


def test_intervals_are_quantiles_over_whole_blocks_of_layers() -> None:
    taken = 3  # the square root of 11 layers
    actual = correlate(frame({"dime": METRIC.tolist()}, {"A": SCORE.tolist()}, num_layers=10), resamples=60, seed=9)
    starts = np.random.default_rng(9).integers(0, 11 - taken + 1, size=(60, -(-11 // taken)))
    spread: dict[str, list[float]] = {"spearman": [], "kendall": [], "dcor": [], "signed_dcor": []}
    for row in starts:
        figure = np.concatenate([np.arange(start, start + taken) for start in row])[:11]
        x, y = METRIC[figure], SCORE[figure]
        if np.ptp(x) == 0 or np.ptp(y) == 0:
            continue
        values = [spearman(x, y), kendall(x, y), distance(x, y)]
        for name, value in zip(spread, [*values, np.sign(values[0]) * values[2]], strict=True):
            spread[name].append(value)
    for row in actual.filter(task="A").iter_rows(named=True):
        low, high = np.quantile(spread[row["statistic"]], [0.025, 0.975])
        assert (row["low"], row["high"]) == pytest.approx((low, high), abs=1e-9), row["statistic"]
    complete = {row["statistic"]: row["value"] for row in actual.filter(task="A").iter_rows(named=True)}
    assert complete["spearman"] == pytest.approx(spearmanr(METRIC, SCORE).statistic)
    assert complete["kendall"] == pytest.approx(kendalltau(METRIC, SCORE).statistic)
    assert complete["dcor"] == pytest.approx(distance(METRIC, SCORE))


def test_models_revisions_and_metrics_do_not_mix_and_values_that_are_not_finite_are_left_out() -> None:
    rows = {key: RANDOM.normal(size=11) for key in ("m", "n", "late")}
    frames = [frame({"dime": METRIC.tolist(), "lidar": values.tolist()}, {"A": SCORE.tolist()}, model=key, num_layers=10)
              for key, values in rows.items()]  # fmt: skip
    frames[2] = frames[2].with_columns(model=pl.lit("m"), revision=pl.lit("step5"))
    frames[1] = frames[1].with_columns(
        value=pl.when((pl.col("layer") == 4) & (pl.col("name") == "lidar")).then(np.inf).otherwise("value")
    )
    actual = correlate(frames, resamples=0).filter(task="A", statistic="kendall", metric="lidar")
    assert actual.select("model", "revision", "metric", "layers").rows() == [
        ("m", "main", "lidar", 11),
        ("n", "main", "lidar", 10),
        ("m", "step5", "lidar", 11),
    ]
    saved = [k for k in range(11) if k != 4]
    expected = [kendall(rows["m"], SCORE), kendall(rows["n"][saved], SCORE[saved]), kendall(rows["late"], SCORE)]
    assert actual["value"].to_list() == pytest.approx(expected)
