"""Bounded background threads that prepare items early or process results late, in order.

No thread outlives its ``with`` block or generator; work that has not started by then is dropped.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from midlayer_encoders._isolation import limit_cores

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, depth: int = 2, threads: int = 1
) -> Generator[tuple[Item, Callable[[], Result]], None, None]:
    """Yield each item and a function that returns its result, computed in other threads a few items ahead.

    Args:
        function: called with each item.
        items: items, in the order of the results.
        depth: number of items computed in advance.
        threads: number of threads.

    Example:
        >>> [result() for _, result in ahead(str.upper, "abc")]
        ['A', 'B', 'C']
    """
    pending: deque[tuple[Item, Future[Result]]] = deque()
    # Threads that share the cores must not each start OpenMP threads for all of them.
    limit = limit_cores if threads > 2 else None
    with ThreadPoolExecutor(threads, thread_name_prefix="midlayer-ahead", initializer=limit) as pool:
        try:
            for item in items:
                pending.append((item, pool.submit(function, item)))
                if len(pending) > depth:
                    first, future = pending.popleft()
                    yield first, future.result
            while pending:
                first, future = pending.popleft()
                yield first, future.result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Behind(Generic[Result]):
    """Runs calls in order in another thread.

    An exception in a call is raised by a later :meth:`hand_on` or at the end of the ``with`` block. Calls that have not
    started by then are dropped, as they are if the block itself raises.

    Args:
        depth: number of calls that may wait; :meth:`hand_on` blocks while there are more.
        done: called in this thread with the result of each call.
    """

    def __init__(self, *, depth: int = 2, done: Callable[[Result], None] = lambda _: None) -> None:
        self.depth = depth
        self.done = done
        self._pending: deque[Future[Result]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="midlayer-behind")

    def __enter__(self) -> Self:
        return self

    def hand_on(self, call: Callable[..., Result], *args: Any) -> None:
        """Schedule ``call(*args)`` after the earlier calls."""
        while self._pending and (len(self._pending) >= self.depth or self._pending[0].done()):
            self.done(self._pending.popleft().result())
        previous = self._pending[-1] if self._pending else None
        self._pending.append(self._pool.submit(self._run, previous, call, *args))

    def _run(self, previous: Future[Result] | None, call: Callable[..., Result], *args: Any) -> Result:
        if previous is not None:
            previous.result()  # raises the exception of an earlier call
        return call(*args)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            while error is None and self._pending:
                self.done(self._pending.popleft().result())
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
