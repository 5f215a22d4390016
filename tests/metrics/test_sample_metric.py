"""The capped sample is the same for any order, batch split and sharding."""

import pytest
import torch

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import TooFewTextsError
from midlayer_encoders.metrics._sample_metric import SampleMetric, hash_index
from tests.metrics.feeding import corpus, feed, make, value
from tests.metrics.test_layer_metric import SAMPLES


def hash_by_definition(index: int, seed: int) -> int:
    """SplitMix64's output function, on unsigned words."""
    word = 2**64 - 1
    mixed = (index + seed + 1) * 0x9E3779B97F4A7C15 & word
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & word
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & word
    mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_hash_is_splitmix(seed: int) -> None:
    index = torch.tensor([0, 1, 2, 1000, 2**40])
    assert hash_index(index, seed).tolist() == [hash_by_definition(i, seed) for i in index.tolist()]


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_is_the_texts_with_the_smallest_hashes(name: str) -> None:
    texts = corpus(texts=60)
    saved = hash_index(torch.arange(60), 5).argsort()[:8].sort().values
    metric = feed(make(name, range(3), max_samples=8, seed=5), texts, torch.arange(60).split(7))
    assert isinstance(metric, SampleMetric)
    expected = value(name, texts, [saved], seed=5)
    assert torch.equal(metric.compute()[1:], expected[1:])
    assert metric.num_samples == metric.max_samples == 8
    assert not torch.equal(value(name, texts, max_samples=8, seed=6)[1:], expected[1:])


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_is_independent_of_order_and_memory_is_bounded(name: str) -> None:
    texts = corpus(texts=60)
    expected = value(name, texts, max_samples=8)
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(3))
    metric = feed(make(name, range(3), max_samples=8), texts, shuffled.split(5))
    assert isinstance(metric, SampleMetric)
    assert torch.equal(metric.compute()[1:], expected[1:])
    assert sum(map(len, metric.rows_0)) <= 2 * 8 * metric.views


@pytest.mark.parametrize("name", SAMPLES)
def test_repeated_text_counts_once(name: str) -> None:
    texts = corpus()
    twice = [torch.arange(13), torch.tensor([3, 4]), torch.tensor([4])]
    assert torch.equal(value(name, texts, twice)[1:], value(name, texts)[1:])


@pytest.mark.parametrize("name", ["intrinsic_dimension", "cka", "neighbor_overlap", "uniformity", "half_match"])
def test_without_index_texts_are_numbered_in_order(name: str) -> None:
    texts = corpus()
    metric = make(name, range(3))
    for batch in torch.arange(13).split(5):
        for layer in range(3):
            tokens = (texts.states[layer, batch], texts.mask[batch])
            metric.update(*(tokens if metric.kind == "tokens" else [texts.pooled[layer, batch]]), layer=layer)
    assert torch.equal(metric.compute()[1:], value(name, texts)[1:])


@pytest.mark.parametrize("name", ["infonce", "lidar", "dime", "alignment"])
def test_missing_view_is_an_error(name: str) -> None:
    texts = corpus()
    metric = feed(make(name, range(3)), texts, [torch.arange(13)])
    metric.update(texts.views[1, 0, :1], view=0, index=torch.tensor([99]), layer=1)
    with pytest.raises(TooFewTextsError, match=r"all \d views of every text, but layer 1 has \d+ vectors of 14 texts"):
        metric.compute()


@pytest.mark.parametrize("name", ["infonce", "dime", "alignment"])
def test_views_after_the_second_are_ignored(name: str) -> None:
    texts = corpus(views=6)
    two = corpus(views=6)
    two.views[:, 2:] = 0.0
    assert torch.equal(value(name, texts), value(name, two))


def test_negative_view_and_small_cap_are_refused() -> None:
    with pytest.raises(OptionError, match="`view` must be 0 or more"):
        make("dime", [0]).update(torch.ones(2, 2), view=-1, index=torch.arange(2), layer=0)
    with pytest.raises(OptionError, match="`max_samples` must be a whole number, 2 or more"):
        make("cka", [0], max_samples=1)


@pytest.mark.parametrize("name", ["cka", "neighbor_overlap"])
def test_pairs_need_the_same_texts(name: str) -> None:
    texts = corpus()
    metric = make(name, [0, 1])
    metric.update(texts.pooled[0], index=torch.arange(13), layer=0)
    metric.update(texts.pooled[1], index=torch.arange(13) + 1, layer=1)
    with pytest.raises(OptionError, match="the same texts"):
        metric.compute()
