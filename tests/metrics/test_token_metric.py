"""Texts that wait for those of the next layers, as they do on a GPU, are in every sum that is read."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

from midlayer_encoders.metrics.token_metrics import WaitingTokenMetric
from tests.metrics.feeding import corpus, feed, make

NAMES = ["prompt_entropy", "curvature"]
BATCHES = torch.arange(13).split(4)


def texts_that_wait(metric: WaitingTokenMetric) -> int:
    return sum(len(rows) for rows, _ in (*metric._states, *metric._waiting))


@pytest.fixture(params=["states", "ingredients"])
def waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], WaitingTokenMetric]:
    """Return metrics of three layers in which all texts wait, the last batch smaller than the others."""
    monkeypatch.setattr(WaitingTokenMetric, "_waits", lambda *_: True)
    if request.param == "ingredients":
        monkeypatch.setattr(WaitingTokenMetric, "_max_state_bytes", 0)

    def fed(name: str) -> WaitingTokenMetric:
        metric = feed(make(name, range(3)), corpus(), BATCHES)
        assert isinstance(metric, WaitingTokenMetric)
        assert len(metric._states if request.param == "states" else metric._waiting) == 12
        assert texts_that_wait(metric) == 39
        assert metric.count.tolist() == [0, 0, 0]
        return metric

    return fed


@pytest.mark.parametrize("name", NAMES)
def test_compute_settles_once(name: str, waiting: Callable[[str], WaitingTokenMetric]) -> None:
    metric = waiting(name)
    expected = metric.compute()
    assert (texts_that_wait(metric), metric.count.tolist()) == (0, [13, 13, 13])
    feed(metric, corpus(), [torch.arange(13)])
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-12, atol=1e-12)
    assert metric.count.tolist() == [26, 26, 26]


@pytest.mark.parametrize("name", NAMES)
def test_reset_forgets_and_a_copy_keeps(name: str, waiting: Callable[[str], WaitingTokenMetric]) -> None:
    metric = waiting(name)
    copy = pickle.loads(pickle.dumps(metric))
    metric.reset()
    feed(metric, corpus(), BATCHES)
    torch.testing.assert_close(metric.compute(), copy.compute(), rtol=0, atol=0)
    assert metric.count.tolist() == [13, 13, 13]


@pytest.mark.parametrize("name", NAMES)
def test_a_sync_and_its_undoing_lose_nothing(name: str, waiting: Callable[[str], WaitingTokenMetric]) -> None:
    metric = waiting(name)
    metric.sync(dist_sync_fn=lambda state, group: [state, state], distributed_available=lambda: True)
    assert metric.count.tolist() == [26, 26, 26]
    metric.unsync()
    assert metric.count.tolist() == [13, 13, 13]


@pytest.mark.parametrize("name", NAMES)
def test_merging_two_metrics(name: str, waiting: Callable[[str], WaitingTokenMetric]) -> None:
    metric, other = waiting(name), waiting(name)
    metric.merge_state(other)
    metric.compute()
    assert metric.count.tolist() == [26, 26, 26]


@pytest.mark.parametrize("name", NAMES)
def test_another_width_or_length_does_not_wait_with_the_rest(
    name: str, waiting: Callable[[str], WaitingTokenMetric]
) -> None:
    metric, longer = waiting(name), corpus(tokens=9, width=6)
    expected = feed(make(name, range(3)), longer, [torch.arange(13)]).compute()
    first = waiting(name).compute()
    feed(metric, longer, [torch.arange(13)])
    assert (texts_that_wait(metric), metric.count.tolist()) == (39, [13, 13, 13])
    torch.testing.assert_close(metric.compute(), (first + expected) / 2)


@pytest.mark.parametrize("name", NAMES)
def test_updated_in_inference_mode_and_computed_outside(
    name: str, waiting: Callable[[str], WaitingTokenMetric]
) -> None:
    with torch.inference_mode():
        metric = waiting(name)
    torch.testing.assert_close(metric.compute(), waiting(name).compute())


@pytest.mark.parametrize("name", NAMES)
def test_states_that_a_block_changes_in_place_are_measured_as_they_were(
    name: str, waiting: Callable[[str], WaitingTokenMetric]
) -> None:
    expected = waiting(name).compute()
    metric, states = make(name, range(3)), corpus()
    for layer in range(3):
        for batch in BATCHES:
            given = states.states[layer][batch].clone()
            metric.update(layer, given, states.mask[batch])
            given.zero_()
    torch.testing.assert_close(metric.compute(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_states_are_taken_together_once_they_are_many(
    name: str, waiting: Callable[[str], WaitingTokenMetric], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = waiting(name).compute()
    bytes_of_batch = corpus().states[0][BATCHES[0]].nbytes
    monkeypatch.setattr(WaitingTokenMetric, "_max_state_bytes", 4 * bytes_of_batch)
    metric = feed(make(name, range(3)), corpus(), BATCHES)
    assert isinstance(metric, WaitingTokenMetric)
    assert 1 <= len(metric._waiting) <= 3
    torch.testing.assert_close(metric.compute(), expected)
