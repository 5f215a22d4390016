"""Seeds: the same one repeats to the bit, another one changes what is drawn and nothing else, and none is the global."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders.encoder.sentence_transformers_encoder import select_layer
from midlayer_encoders.metrics import METRICS
from midlayer_encoders.selection import Selection, select
from tests.test_measured_by_hand import TEXTS

Folder = Callable[[str], str]
OF_VIEWS = {"infonce", "lidar", "dime"}
KINDS = ["ab"[ord(text[0]) % 2] for text in TEXTS]


@pytest.fixture(scope="module")
def whole(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu", dtype="float64")


@pytest.fixture
def generators() -> Iterator[None]:
    """Set the global generators, and fail the test when any of them was drawn from or set."""
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)
    python, numpy, torch_ = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    yield
    assert random.getstate() == python
    np.testing.assert_equal(np.random.get_state(legacy=False), numpy)
    assert torch.equal(torch.get_rng_state(), torch_)


def changed(first: pl.DataFrame, second: pl.DataFrame) -> set[str]:
    """Return the names whose values differ; everything else about the rows must be equal."""
    assert first.drop("value").equals(second.drop("value"))
    return set(first.filter(first["value"] != second["value"])["name"])


def test_the_seed_of_measure_is_that_of_the_views(whole: LayerEncoder, generators: None) -> None:
    asked: dict[str, Any] = {"metrics": "all", "layers": [0, 3], "views": 2}
    first, again, other = (measure(whole, TEXTS, seed=seed, **asked) for seed in (0, 0, 1))
    assert first.equals(again)
    assert first.equals(measure(whole, TEXTS, **asked)), "the seed is 0 unless given"
    assert set(first["name"]) == set(METRICS)
    assert changed(first, other) == OF_VIEWS


@pytest.mark.parametrize("choose", [select, pytest.param(select_layer, marks=pytest.mark.slow)])
def test_the_seed_of_a_selection_is_that_of_views_folds_and_resamples(
    choose: Callable[..., Selection], whole: LayerEncoder, generators: None
) -> None:
    first, again, other = (choose(whole, TEXTS, KINDS, rule="min-dime+infonce", seed=seed) for seed in (0, 0, 4))
    assert (first.choices, first.labels) == (again.choices, again.labels)
    assert first.frame.equals(again.frame)
    assert changed(first.frame, other.frame) == {"infonce", "dime", "accuracy"}
    assert first.labels is not None
    assert other.labels is not None
    assert (first.labels.low, first.labels.high) != (other.labels.low, other.labels.high)
    default = choose(whole, TEXTS, KINDS, rule="min-dime+infonce")
    assert default.frame.equals(first.frame)
    assert default.labels == first.labels
