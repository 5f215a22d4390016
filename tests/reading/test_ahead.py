"""Threads that run ahead or behind: in order, bounded, and gone when the caller is done."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from midlayer_encoders.reading.ahead import Behind, ahead


def ours() -> list[str]:
    """Return the names of the threads that are still running."""
    return [item.name for item in threading.enumerate() if item.name.startswith("midlayer-")]


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_are_bounded(threads: int) -> None:
    started: list[int] = []

    def make(item: int) -> int:
        started.append(item)
        time.sleep(0.002 * (item % 3))
        return item * item

    taken = []
    for item, result in ahead(make, range(20), depth=2, threads=threads):
        time.sleep(0.003)
        assert len(started) <= item + 3
        taken.append(result())
    assert taken == [item * item for item in range(20)]
    assert not ours()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_items_are_taken_exactly_as_far_ahead_as_asked(depth: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(6):
            taken.append(number)
            yield number

    ahead_by = [len(taken) - 1 - item for item, _ in ahead(abs, items(), depth=depth)]
    assert ahead_by == [min(depth, 5 - item) for item in range(6)]


def test_error_of_an_item_is_raised_for_that_item() -> None:
    def make(item: int) -> float:
        return 1 / item

    actual = []
    for item, result in ahead(make, [2, 0, 1]):
        try:
            actual.append(result())
        except ZeroDivisionError:
            actual.append(-item)
    assert actual == [0.5, 0, 1.0]


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


def close_ahead(call: Callable[[int], None]) -> None:
    running = ahead(call, range(10), depth=3)
    next(running)
    running.close()


def raise_behind(call: Callable[[int], None]) -> None:
    with suppress(ValueError), Behind[None](depth=4) as behind:
        for item in range(4):
            behind.hand_on(call, item)
        raise ValueError


@pytest.mark.parametrize("leave", [close_ahead, raise_behind])
def test_calls_that_have_not_started_are_dropped(leave: Callable[[Callable[[int], None]], None]) -> None:
    started: list[int] = []
    has_left = threading.Event()

    def call(item: int) -> None:
        started.append(item)
        has_left.wait(5)

    threading.Timer(0.1, has_left.set).start()  # the call that runs ends after the others were dropped
    leave(call)
    assert started == [0]


def test_calls_run_in_order_and_pending_ones_are_bounded() -> None:
    result: list[int] = []
    process: list[int] = []
    most = 0

    def call(item: int) -> int:
        time.sleep(0.002)
        result.append(item)
        return item

    with Behind[int](depth=2, done=process.append) as behind:
        for item in range(12):
            behind.hand_on(call, item)
            most = max(most, item + 1 - len(result))
    assert result == process == list(range(12))
    assert 1 < most <= 3
    assert not ours()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_exactly_as_many_calls_wait_as_asked(depth: int) -> None:
    handed = [threading.Event() for _ in range(depth + 1)]
    seen: list[bool] = []

    def first() -> None:  # all calls that may wait are handed on while it runs, and no other
        seen.extend((handed[depth - 1].wait(5), handed[depth].wait(0.1)))

    with Behind[None](depth=depth) as behind:
        for number, event in enumerate(handed):
            behind.hand_on(first if number == 0 else bool)
            event.set()
    assert seen == [True, False]


def test_error_in_the_background_is_raised_and_stops_the_calls() -> None:
    result: list[int] = []

    def call(item: int) -> None:
        if item == 2:
            raise OSError("no room")
        result.append(item)

    handed: list[int] = []

    def hand_on(items: range) -> None:
        with Behind[None]() as behind:
            for item in items:
                behind.hand_on(call, item)
                handed.append(item)

    with pytest.raises(OSError, match="no room"):
        hand_on(range(50))
    assert result == [0, 1]
    assert len(handed) < 10
    with pytest.raises(OSError, match="no room"):
        hand_on(range(2, 3))  # the last one: at the end of the block
    assert not ours()
