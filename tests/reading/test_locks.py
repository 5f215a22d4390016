"""Turns: threads wait for the one that has it, and for no other."""

from __future__ import annotations

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
from tests.families import inputs, tiny

_SECONDS = 10  # after which a thread that waits will wait forever


def test_another_thread_waits_and_the_same_does_not() -> None:
    model, entered = nn.Linear(1, 1), Event()

    def enter() -> None:
        with turn(model):
            entered.set()

    with ThreadPoolExecutor(1) as threads, turn(model):
        with turn(model):
            waiting = threads.submit(enter)
        assert not entered.wait(0.05)  # the inner turn is over, the outer one is not
    waiting.result(_SECONDS)
    assert entered.is_set()


def test_locks_with_different_objects_do_not_wait_for_one_another() -> None:
    models: list[Any] = [nn.Linear(1, 1), nn.Linear(1, 1)]
    models += [copy.deepcopy(models[0]), copy.copy(models[0]), pickle.loads(pickle.dumps(models[0]))]
    together = Barrier(len(models))

    def meet(model: Any) -> None:
        with turn(model):
            together.wait(_SECONDS)  # broken where one of them cannot have its turn

    with ThreadPoolExecutor(len(models)) as threads:
        list(threads.map(meet, models))


class Slots:
    """Cannot be referred to weakly, nor be found in a dictionary."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def test_any_object_has_turns() -> None:
    with turn(Slots()) as own, turn([]) as inner:
        assert not own()
        assert inner()


def test_nothing_is_kept_of_an_object_that_is_gone() -> None:
    model = nn.Linear(1, 1)
    with turn(model):
        pass
    assert model in locks._locks
    count = len(locks._locks)
    del model
    gc.collect()
    assert len(locks._locks) < count


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks() -> None:
    """As workers of a DataLoader, which preprocess: the thread that has the turn is not in them."""
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
def test_a_capture_looks_at_its_own_pass_alone(where: str) -> None:
    """A model may be called beside a capture, or by what receives the states: neither sees anything of the other."""
    model: Any = tiny("Llama")
    anatomy, batch = find_anatomy(model), inputs("Llama")
    plain, other = model(**batch).last_hidden_state, {name: value[:, :4] for name, value in batch.items()}
    seen: list[tuple[int, Tensor]] = []
    capture(model, batch, lambda layer, _, states: seen.append((layer, states)), anatomy=anatomy, layers=range(5))
    again: list[tuple[int, Tensor]] = []
    short: list[Tensor] = []

    def receive(layer: int, _: str, states: Tensor) -> None:
        again.append((layer, states))
        if where == "another thread":
            short.append(threads.submit(torch.no_grad()(model), **other).result(_SECONDS).last_hidden_state)
        else:
            capture(model, other, lambda *made: short.append(made[2]), anatomy=anatomy, layers=[4], norm="final")

    with ThreadPoolExecutor(1) as threads:
        capture(model, batch, receive, anatomy=anatomy, layers=range(5))
    assert [layer for layer, _ in again] == [layer for layer, _ in seen] == list(range(5))
    for (_, states), (_, expected) in zip(again, seen, strict=True):
        assert torch.equal(states, expected)
    assert len(short) == 5
    for states in short:
        torch.testing.assert_close(states, plain[:, :4])
