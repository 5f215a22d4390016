"""Processes that run calls, forked from a process that imports a module once.

An import of mteb and sentence-transformers takes ten seconds and 500 MB. Unlike the processes of ``multiprocessing``,
these do not run the caller's script again.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any
from unittest import mock

import cloudpickle

_IDLE_SECONDS = 300  # after which the processes end
# One thread each by default: with two that share two cores, a logistic regression took seven times as long.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_starting = threading.Lock()


class ProcessPool:
    """Processes for calls: they start at once and end when they are idle, killed, or with this process.

    Args:
        module: imported before the first call.
        count: number of processes.
        threads: of each process.
        variables: of its environment.
    """

    def __init__(self, module: str, count: int, threads: int = 1, variables: Mapping[str, str] | None = None) -> None:
        environment = dict.fromkeys(_THREAD_VARIABLES, str(threads)) | dict(variables or {})
        self._owner = os.getpid()
        self._connection, far_end = get_context("spawn").Pipe()
        self._server = SpawnProcess(target=_serve, args=(module, count, self._owner, environment, far_end))
        main = sys.modules["__main__"]
        with _starting, mock.patch.multiple(main, create=True, __file__=None, __spec__=None):  # it is not run again
            self._server.start()
        far_end.close()
        self._is_broken = False
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._sending = threading.Lock()
        threading.Thread(target=self._receive, daemon=True).start()
        atexit.register(self.kill)  # a process that still imports would keep this one waiting

    @property
    def is_alive(self) -> bool:
        """False once any of the processes has ended."""
        return not self._is_broken and self._server.is_alive()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call the function in a process; the future raises a ``BrokenExecutor`` if a process is killed."""
        call = cloudpickle.dumps((function, args))
        number, future = next(self._numbers), Future[Any]()
        future.set_running_or_notify_cancel()
        self._futures[number] = future
        with self._sending, suppress(OSError):
            self._connection.send((number, call))
        if not self.is_alive:
            self._break()
        return future

    def kill(self) -> None:
        """End the processes now, unless this is a fork of the process that started them."""
        if os.getpid() == self._owner:
            self._server.kill()
            self._server.join()
            atexit.unregister(self.kill)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):  # the server has ended
            while True:
                number, value, error = self._connection.recv()
                if isinstance(error, BrokenExecutor):
                    break
                future = self._futures.pop(number)
                future.set_result(value) if error is None else future.set_exception(error)
        self._break()

    def _break(self) -> None:
        self._is_broken = True
        while self._futures:
            with suppress(KeyError):  # another thread has it
                self._futures.popitem()[1].set_exception(BrokenExecutor("a process has ended"))


def _serve(module: str, count: int, parent: int, environment: Mapping[str, str], connection: Connection) -> None:
    """Import the module and answer calls in forks of this process, until one of them or ``parent`` ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the parent, which kills this process
    end_with_parent(parent)
    os.environ.update(environment)
    importlib.import_module(module)
    gc.freeze()  # a collection would copy what the processes share
    # A process that has imported Apple's frameworks cannot fork.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(count, context, end_with_parent, (os.getpid(),))
    futures: list[Future[Any]] = []
    with suppress(EOFError, BrokenExecutor):
        while True:
            is_idle = all(future.done() for future in futures)
            if connection.poll(_IDLE_SECONDS):
                number, call = connection.recv()
                futures.append(pool.submit(_call, call))
                futures[-1].add_done_callback(partial(_send, connection, number))
            elif is_idle:
                break
    os._exit(1)


def _send(connection: Connection, number: int, future: Future[Any]) -> None:
    error = future.exception()
    connection.send((number, None if error is not None else future.result(), error))


def _call(pickled: bytes) -> Any:
    function, args = cloudpickle.loads(pickled)
    return function(*args)


def end_with_parent(parent: int) -> None:
    """End this process within a second of its parent, even if the parent is killed.

    Args:
        parent: process that started this one.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
