"""Work of another thread that runs ahead of this one, or behind it: in order, bounded, and over when this one is.

No thread outlives its ``with`` block or its generator, whatever ends it; what has not begun by then is not done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def ahead(
    make: Callable[[Item], Made], items: Iterable[Item], *, depth: int = 2, threads: int = 1
) -> Generator[tuple[Item, Callable[[], Made]], None, None]:
    """Yield each item and what returns, or raises, what ``make`` makes of it: in other threads, some items ahead.

    Args:
        make: called with each item.
        items: in the order of the results.
        depth: items that are made before they are asked for.
        threads: that make them.

    Example:
        >>> [result() for _, result in ahead(str.upper, "abc")]
        ['A', 'B', 'C']
    """
    waiting: deque[tuple[Item, Future[Made]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="midlayer-ahead") as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(make, item)))
                if len(waiting) > depth:
                    first, future = waiting.popleft()
                    yield first, future.result
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Behind(Generic[Made]):
    """Calls that another thread makes in the order in which they are handed to it, while this one goes on.

    What a call raises is raised here, by the next :meth:`hand_on` or at the end of the ``with`` block, and no later
    call is made after it. Where the block itself raises, calls that have not begun are not made.

    Args:
        depth: calls that may wait; :meth:`hand_on` waits while there are more.
        done: called in this thread with the result of each call.
    """

    def __init__(self, *, depth: int = 2, done: Callable[[Made], None] | None = None) -> None:
        self.depth, self.done = depth, done
        self._waiting: deque[Future[Made]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="midlayer-behind")
        self._failed = False

    def __enter__(self) -> Behind[Made]:
        return self

    def hand_on(self, call: Callable[..., Made], *args: Any) -> None:
        """Have ``call(*args)`` made, after those before it."""
        while self._waiting and (len(self._waiting) >= self.depth or self._waiting[0].done()):
            self._take()
        self._waiting.append(self._pool.submit(self._unless_failed, call, *args))

    def _unless_failed(self, call: Callable[..., Made], *args: Any) -> Made:
        if self._failed:
            raise RuntimeError("an earlier call failed")  # which is raised first
        try:
            return call(*args)
        except BaseException:
            self._failed = True
            raise

    def _take(self) -> None:
        result = self._waiting.popleft().result()
        if self.done is not None:
            self.done(result)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            while error is None and self._waiting:
                self._take()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
