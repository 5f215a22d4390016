"""Locks: threads wait for the holder of the same lock only."""

import copy
import gc
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading import locks
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.reading.locks import turn
from tests.support.families import inputs, tiny

_SECONDS = 10  # a thread that waits longer would wait forever


def test_another_thread_waits_and_the_same_thread_does_not() -> None:
    model, entered = nn.Linear(1, 1), Event()

    def enter() -> None:
        with turn(model):
            entered.set()

    with ThreadPoolExecutor(1) as threads, turn(model):
        with turn(model):
            waiting = threads.submit(enter)
        assert not entered.wait(0.05)  # the inner lock is released, the outer one is not
    waiting.result(_SECONDS)
    assert entered.is_set()


def test_locks_of_different_objects_are_independent() -> None:
    models: list[Any] = [nn.Linear(1, 1), nn.Linear(1, 1)]
    models += [copy.deepcopy(models[0]), copy.copy(models[0]), pickle.loads(pickle.dumps(models[0]))]
    together = Barrier(len(models))

    def meet(model: Any) -> None:
        with turn(model):
            together.wait(_SECONDS)  # fails if one of them cannot get its lock

    with ThreadPoolExecutor(len(models)) as threads:
        list(threads.map(meet, models))


class Slots:
    """Not hashable and without weak references."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def test_any_object_can_be_locked() -> None:
    with turn(Slots()) as own_values, turn([]) as inner:
        assert not own_values()
        assert inner()


def test_deleted_object_leaves_nothing_behind() -> None:
    model = nn.Linear(1, 1)
    with turn(model):
        pass
    assert model in locks._locks
    count = len(locks._locks)
    del model
    gc.collect()
    assert len(locks._locks) < count


def test_forked_process_does_not_wait_for_missing_threads() -> None:
    """DataLoader workers preprocess in a fork that lacks the thread holding the lock."""
    model, has_it, forked = nn.Linear(1, 1), Event(), Event()

    def have() -> None:
        with turn(model):
            has_it.set()
            forked.wait(_SECONDS)

    def enter() -> None:
        with turn(model):
            pass

    with ThreadPoolExecutor(1) as threads:
        threads.submit(have)
        has_it.wait(_SECONDS)
        child = multiprocessing.get_context("fork").Process(target=enter)
        child.start()
        child.join(_SECONDS)
        forked.set()
    assert child.exitcode == 0


@pytest.mark.parametrize("where", ["another thread", "the receiver"])
@torch.no_grad()
def test_capture_records_only_its_own_pass(where: str) -> None:
    """A model may be called during a capture or by its receiver: neither sees the states of the other."""
    model: Any = tiny("Llama")
    anatomy, batch = find_anatomy(model), inputs("Llama")
    plain, second = model(**batch).last_hidden_state, {name: value[:, :4] for name, value in batch.items()}
    recorded: list[tuple[int, Tensor]] = []
    capture(model, batch, lambda layer, states: recorded.append((layer, states)), anatomy=anatomy, layers=range(5))
    repeated: list[tuple[int, Tensor]] = []
    short: list[Tensor] = []

    def receive(layer: int, states: Tensor) -> None:
        repeated.append((layer, states))
        if where == "another thread":
            short.append(threads.submit(torch.no_grad()(model), **second).result(_SECONDS).last_hidden_state)
        else:
            capture(model, second, lambda _, states: short.append(states), anatomy=anatomy, layers=[4], norm="final")

    with ThreadPoolExecutor(1) as threads:
        capture(model, batch, receive, anatomy=anatomy, layers=range(5))
    assert [layer for layer, _ in repeated] == [layer for layer, _ in recorded] == list(range(5))
    for (_, states), (_, expected) in zip(repeated, recorded, strict=True):
        assert torch.equal(states, expected)
    assert len(short) == 5
    for states in short:
        torch.testing.assert_close(states, plain[:, :4])
