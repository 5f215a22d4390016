"""Turns: one thread at a time with a model, or with a tokenizer, that several threads share.

Hooks on a model see the passes of every thread, and a fast tokenizer keeps how it truncates and pads between two calls
(or raises ``Already borrowed``), so whatever runs one of them takes a turn.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Queue:
    """Where threads wait for their turn, and how many turns the one that has it is inside of."""

    def __init__(self) -> None:
        self.lock, self.depth = threading.RLock(), 0


# Beside the objects, not in them: a copy, or what is unpickled, has turns of its own, and files hold none.
_queues: dict[int, _Queue] = {}
_guard = threading.Lock()


@contextmanager
def turn(shared: Any) -> Iterator[Callable[[], bool]]:
    """Wait until no other thread has a turn with ``shared``, and have it until the block is left.

    A thread that has the turn may take another inside of it. Turns with different objects do not wait for one another.

    Args:
        shared: a model or a tokenizer. Turns belong to the object itself, whatever equals it.

    Yields:
        What returns whether its caller is in this turn: not in another thread, and not in a turn inside of this one.

    Example:
        >>> model = threading.Event()
        >>> with turn(model) as outer:
        ...     with turn(model) as inner:
        ...         print(outer(), inner())
        ...     print(outer())
        False True
        True
    """
    queue = _queue_of(shared)
    with queue.lock:
        queue.depth += 1
        thread, depth = threading.get_ident(), queue.depth
        try:
            yield lambda: threading.get_ident() == thread and queue.depth == depth
        finally:
            queue.depth -= 1


def _queue_of(shared: Any) -> _Queue:
    with _guard:
        if id(shared) not in _queues:
            try:
                weakref.finalize(shared, _queues.pop, id(shared), None).atexit = False
            except TypeError:  # of a class with slots: nobody would say when it is gone, so all of them share one queue
                return _queues.setdefault(0, _Queue())
            _queues[id(shared)] = _Queue()
        return _queues[id(shared)]


def _start_anew() -> None:
    """Forget the turns of a parent process: its other threads, which would end them, are not in this one."""
    global _guard
    _guard = threading.Lock()
    _queues.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)  # workers of a DataLoader, which preprocess, are forked
