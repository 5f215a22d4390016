"""Threads that run ahead or behind: in order, bounded, and gone when the caller is done, however that ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from midlayer_encoders.reading.ahead import Behind, ahead


def ours() -> list[str]:
    """Return the names of the threads that are still there."""
    return [one.name for one in threading.enumerate() if one.name.startswith("midlayer-")]


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_not_too_soon(threads: int) -> None:
    begun: list[int] = []

    def make(item: int) -> int:
        begun.append(item)
        time.sleep(0.002 * (item % 3))
        return item * item

    taken = []
    for item, result in ahead(make, range(20), depth=2, threads=threads):
        time.sleep(0.003)
        assert len(begun) <= item + 3
        taken.append(result())
    assert taken == [item * item for item in range(20)]
    assert not ours()


def test_what_one_item_raises_is_raised_for_that_item() -> None:
    def make(item: int) -> float:
        return 1 / item

    found = []
    for item, result in ahead(make, [2, 0, 1]):
        try:
            found.append(result())
        except ZeroDivisionError:
            found.append(-item)
    assert found == [0.5, 0, 1.0]


def raise_ahead(error: type[BaseException]) -> None:
    with closing(ahead(time.sleep, [0.01] * 10)) as running:
        for _ in running:
            raise error


def raise_before(error: type[BaseException]) -> None:
    with Behind[None]() as behind:
        for _ in range(2):
            behind.hand_on(time.sleep, 0.01)
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fail", [raise_ahead, raise_before])
def test_no_thread_is_left_when_the_caller_raises(
    fail: Callable[[type[BaseException]], None], error: type[BaseException]
) -> None:
    with pytest.raises(error):
        fail(error)
    assert not ours()


def test_calls_are_made_in_order_behind_and_no_more_wait_than_may() -> None:
    made: list[int] = []
    done: list[int] = []
    most = 0

    def call(item: int) -> int:
        time.sleep(0.002)
        made.append(item)
        return item

    with Behind[int](depth=2, done=done.append) as behind:
        for item in range(12):
            behind.hand_on(call, item)
            most = max(most, item + 1 - len(made))
    assert made == done == list(range(12))
    assert 1 < most <= 3
    assert not ours()


def test_an_error_behind_is_raised_here_and_ends_the_calls() -> None:
    made: list[int] = []

    def call(item: int) -> None:
        if item == 2:
            raise OSError("no room")
        made.append(item)

    handed: list[int] = []

    def hand_on(items: range) -> None:
        with Behind[None]() as behind:
            for item in items:
                behind.hand_on(call, item)
                handed.append(item)

    with pytest.raises(OSError, match="no room"):
        hand_on(range(50))
    assert made == [0, 1]
    assert len(handed) < 10
    with pytest.raises(OSError, match="no room"):
        hand_on(range(2, 3))  # the last one: at the end of the block
    assert not ours()
