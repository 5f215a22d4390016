"""Seeds: the same seed repeats bitwise, another changes only what is drawn, and the global generators are unused."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders.encoder.whole_model import select_layer
from midlayer_encoders.metrics import METRICS
from midlayer_encoders.selection import Selection, select
from tests.support.tiny_folders import Folder
from tests.test_measured_by_hand import TEXTS

VIEW_METRICS = {"infonce", "lidar", "dime", "alignment"}
KINDS = ["ab"[ord(text[0]) % 2] for text in TEXTS]


@pytest.fixture(scope="module")
def full_encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu", dtype="float64")


@pytest.fixture
def generators() -> Iterator[None]:
    """Seed the global generators, and fail the test if any of them was used or set."""
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)
    python, numpy, torch_ = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    yield
    assert random.getstate() == python
    np.testing.assert_equal(np.random.get_state(legacy=False), numpy)
    assert torch.equal(torch.get_rng_state(), torch_)


def changed_metrics(first: pl.DataFrame, second: pl.DataFrame) -> set[str]:
    """Return the names whose values differ; all other columns must be equal."""
    assert first.drop("value").equals(second.drop("value"))
    return set(first.filter(first["value"] != second["value"])["name"])


def test_seed_of_measure_changes_only_view_metrics(full_encoder: LayerEncoder, generators: None) -> None:
    options: dict[str, Any] = {"metrics": "all", "layers": [0, 3], "views": 2}
    first, repeated, other_seed = (measure(full_encoder, TEXTS, seed=seed, **options) for seed in (0, 0, 1))
    assert first.equals(repeated)
    assert first.equals(measure(full_encoder, TEXTS, **options)), "the default seed is 0"
    assert set(first["name"]) == set(METRICS)
    assert changed_metrics(first, other_seed) == VIEW_METRICS


@pytest.mark.long
@pytest.mark.parametrize("select_function", [select, pytest.param(select_layer, marks=pytest.mark.slow)])
def test_seed_of_a_selection_changes_views_folds_and_resamples(
    select_function: Callable[..., Selection], full_encoder: LayerEncoder, generators: None
) -> None:
    first, repeated, other_seed = (
        select_function(full_encoder, TEXTS, KINDS, rule="min-dime", all_rules=True, seed=seed) for seed in (0, 0, 4)
    )
    assert (first.choices, first.labels) == (repeated.choices, repeated.labels)
    assert first.frame.equals(repeated.frame)
    assert changed_metrics(first.frame, other_seed.frame) == {"infonce", "dime", "accuracy"}
    assert first.labels is not None
    assert other_seed.labels is not None
    assert (first.labels.low, first.labels.high) != (other_seed.labels.low, other_seed.labels.high)
    default = select_function(full_encoder, TEXTS, KINDS, rule="min-dime", all_rules=True)
    assert default.frame.equals(first.frame)
    assert default.labels == first.labels
