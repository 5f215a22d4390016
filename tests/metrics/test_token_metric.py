"""Texts that are computed together with those of later layers, as on a GPU, are included in every sum."""

import pickle
from collections.abc import Callable

import pytest
import torch

from midlayer_encoders.metrics.token_metrics import TokenMetric
from tests.metrics.feeding import corpus, feed, make

NAMES = ["prompt_entropy", "curvature"]
BATCHES = torch.arange(13).split(4)


def pending_texts(metric: TokenMetric) -> int:
    return sum(len(rows) for rows, _ in metric._waiting)


@pytest.fixture
def pending_metric(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TokenMetric]:
    """Return metrics of three layers in which all texts are pending, with a smaller last batch."""
    monkeypatch.setattr(TokenMetric, "_waits", lambda *_: True)

    def fed(name: str) -> TokenMetric:
        metric = feed(make(name, range(3)), corpus(), BATCHES)
        assert isinstance(metric, TokenMetric)
        assert len(metric._waiting) == 12
        assert pending_texts(metric) == 39
        assert metric.count.tolist() == [0, 0, 0]
        return metric

    return fed


@pytest.mark.parametrize("name", NAMES)
def test_compute_processes_pending_texts_once(name: str, pending_metric: Callable[[str], TokenMetric]) -> None:
    metric = pending_metric(name)
    expected = metric.compute()
    assert (pending_texts(metric), metric.count.tolist()) == (0, [13, 13, 13])
    feed(metric, corpus(), [torch.arange(13)])
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-12, atol=1e-12)
    assert metric.count.tolist() == [26, 26, 26]


@pytest.mark.parametrize("name", NAMES)
def test_reset_clears_and_a_copy_keeps_pending_texts(name: str, pending_metric: Callable[[str], TokenMetric]) -> None:
    metric = pending_metric(name)
    copy = pickle.loads(pickle.dumps(metric))
    metric.reset()
    feed(metric, corpus(), BATCHES)
    torch.testing.assert_close(metric.compute(), copy.compute(), rtol=0, atol=0)
    assert metric.count.tolist() == [13, 13, 13]


@pytest.mark.parametrize("name", NAMES)
def test_sync_and_unsync_lose_nothing(name: str, pending_metric: Callable[[str], TokenMetric]) -> None:
    metric = pending_metric(name)
    metric.sync(dist_sync_fn=lambda state, group: [state, state], distributed_available=lambda: True)
    assert metric.count.tolist() == [26, 26, 26]
    metric.unsync()
    assert metric.count.tolist() == [13, 13, 13]


@pytest.mark.parametrize("name", NAMES)
def test_another_width_or_length_is_processed_separately(
    name: str, pending_metric: Callable[[str], TokenMetric]
) -> None:
    metric, longer = pending_metric(name), corpus(tokens=9, width=6)
    expected = feed(make(name, range(3)), longer, [torch.arange(13)]).compute()
    first = pending_metric(name).compute()
    feed(metric, longer, [torch.arange(13)])
    assert (pending_texts(metric), metric.count.tolist()) == (39, [13, 13, 13])
    torch.testing.assert_close(metric.compute(), (first + expected) / 2)


@pytest.mark.parametrize("name", NAMES)
def test_updated_in_inference_mode_and_computed_outside(
    name: str, pending_metric: Callable[[str], TokenMetric]
) -> None:
    with torch.inference_mode():
        metric = pending_metric(name)
    torch.testing.assert_close(metric.compute(), pending_metric(name).compute())


@pytest.mark.parametrize("name", NAMES)
def test_states_changed_in_place_are_measured_as_they_were(
    name: str, pending_metric: Callable[[str], TokenMetric]
) -> None:
    expected = pending_metric(name).compute()
    metric, states = make(name, range(3)), corpus()
    for layer in range(3):
        for batch in BATCHES:
            inputs = states.states[layer][batch].clone()
            metric.update(inputs, states.mask[batch], layer=layer)
            inputs.zero_()
    torch.testing.assert_close(metric.compute(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_full_buffer_is_processed(
    name: str, pending_metric: Callable[[str], TokenMetric], monkeypatch: pytest.MonkeyPatch
) -> None:
    metric = pending_metric(name)
    size = sum(tensor.nbytes for _, tensors in metric._waiting for tensor in tensors)
    monkeypatch.setattr(type(metric), "_max_waiting_bytes", size // 3)
    other = feed(make(name, range(3)), corpus(), BATCHES)
    assert isinstance(other, TokenMetric)
    assert 0 < sum(other.count.tolist()) <= 39
    torch.testing.assert_close(other.compute(), metric.compute())
