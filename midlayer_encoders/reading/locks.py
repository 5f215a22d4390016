"""Locks for models and tokenizers that several threads share.

Hooks on a model fire in the passes of all threads, and a fast tokenizer stores its truncation and padding settings
between calls (or raises ``Already borrowed``), so each use of either one holds its lock.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _CountedLock:
    """A reentrant lock and the number of nested blocks that hold it."""

    def __init__(self) -> None:
        self.rlock = threading.RLock()
        self.depth = 0


# Stored outside the objects, so that copies and pickles do not contain locks.
_locks: weakref.WeakKeyDictionary[Any, _CountedLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()
_used = False  # whether a model or tokenizer may have started threads in this process


@contextmanager
def turn(shared: Any) -> Iterator[Callable[[], bool]]:
    """Hold the lock of an object inside a ``with`` block; the lock is reentrant.

    Args:
        shared: a model or a tokenizer, compared by identity.

    Yields:
        A function that returns True in this thread and at this depth, and False in other threads and nested blocks.

    Example:
        >>> model = threading.Event()
        >>> with turn(model) as outer:
        ...     with turn(model) as inner:
        ...         print(outer(), inner())
        ...     print(outer())
        False True
        True
    """
    lock = _lock_of(shared)
    with lock.rlock:
        lock.depth += 1
        thread = threading.get_ident()
        depth = lock.depth
        try:
            yield lambda: threading.get_ident() == thread and lock.depth == depth
        finally:
            lock.depth -= 1


def _lock_of(shared: Any) -> _CountedLock:
    global _used
    with _guard:
        _used = True
        try:
            return _locks.setdefault(shared, _CountedLock())
        except TypeError:  # objects that cannot be weakly referenced share one lock
            return _locks.setdefault(_CountedLock, _CountedLock())


def _reset_after_fork() -> None:
    """Drop the locks of the parent process, whose other threads do not exist in this one.

    Nor do torch's: its parallel regions would crash or wait forever after a pass in the parent.
    """
    global _guard
    if _used:
        torch.set_num_threads(1)  # as a DataLoader does in its workers
    _guard = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)  # DataLoader workers are forked
