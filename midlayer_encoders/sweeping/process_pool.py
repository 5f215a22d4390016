"""Processes that run calls of one module, forked from a process that imports it once.

An import of mteb and sentence-transformers takes ten seconds, and several at a time slow each other down. Unlike the
processes of ``multiprocessing``, these do not run the caller's script again.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import cloudpickle

_IDLE_SECONDS = 300  # after which the processes end
# One thread each by default: with two that share two cores, a logistic regression took seven times as long.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ProcessPool:
    """Processes for calls: they start at once and end when they are idle, killed, or with this process.

    Args:
        module: imported before the first call.
        count: number of processes.
        threads: of each process.
        variables: of its environment.
    """

    def __init__(self, module: str, count: int, threads: int = 1, variables: Mapping[str, str] | None = None) -> None:
        self._last_use = time.monotonic()
        self._count = count
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(count, "midlayer worker")  # each waits for the result of one process
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        ends = [Pipe() for _ in range(count)]
        for near_end, _ in ends:
            self._idle.put(near_end)
        descriptors = [far_end.fileno() for _, far_end in ends]
        path = os.pathsep.join(filter(None, sys.path))
        environment = (
            os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads)) | {"PYTHONPATH": path} | dict(variables or {})
        )
        # A process that has imported Apple's frameworks cannot fork.
        groups = [descriptors] if sys.platform == "linux" else [[each] for each in descriptors]
        call = "from {} import serve; serve({!r}, {}, {})"
        self._starters = [
            subprocess.Popen(
                # -P: without the current folder, whose files may have the names of modules.
                [sys.executable, "-P", "-c", call.format(__name__, module, group, self._owner)],
                env=environment,
                pass_fds=group,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C interrupts this process alone
            )
            for group in groups
        ]
        for _, far_end in ends:
            far_end.close()
        threading.Thread(target=self._end_when_idle, daemon=True).start()
        atexit.register(self.kill)  # processes that still import would keep this one's output open

    def wake(self) -> bool:
        """Postpone the end of idle processes, and return False if any process has ended."""
        with self._lock:
            self._last_use = time.monotonic()
            return all(starter.poll() is None for starter in self._starters)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call the function in a process; the future raises a ``BrokenExecutor`` if the process is killed."""
        return self._threads.submit(self._call, cloudpickle.dumps((function, args)))

    def kill(self) -> None:
        """End the processes now, unless this is a fork of the process that started them."""
        for starter in self._starters if os.getpid() == self._owner else ():
            with suppress(ProcessLookupError):
                os.killpg(starter.pid, 9)
            starter.wait()

    def _call(self, call: bytes) -> Any:
        connection = self._idle.get()
        try:
            connection.send_bytes(call)
            value, error = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as reason:
            self.kill()  # so that `wake` is False
            raise BrokenExecutor("a process has ended") from reason
        finally:
            self._last_use = time.monotonic()
            self._idle.put(connection)
        if error is not None:
            raise error
        return value

    def _end_when_idle(self) -> None:
        while all(starter.poll() is None for starter in self._starters):
            time.sleep(1)
            with self._lock:
                if self._idle.qsize() == self._count and time.monotonic() > self._last_use + _IDLE_SECONDS:
                    self.kill()
        atexit.unregister(self.kill)


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


def serve(module: str, descriptors: Sequence[int], parent: int) -> None:
    """Import the module and answer the calls of each connection in a fork, until ``parent`` ends."""
    end_with_parent(parent)
    importlib.import_module(module)
    gc.freeze()  # a collection would copy what the processes share
    starter = os.getpid()
    is_alone = len(descriptors) == 1
    for descriptor in descriptors:
        if is_alone or os.fork() == 0:
            for other in set(descriptors) - {descriptor}:
                os.close(other)  # so that the end of the other process is noticed at once
            if not is_alone:
                end_with_parent(starter)
            _answer(Connection(descriptor))
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    os.wait()  # the pool ends with the first of its processes


def _answer(connection: Connection) -> None:
    with suppress(EOFError):
        while True:
            call = connection.recv_bytes()
            try:
                function, args = cloudpickle.loads(call)
                outcome = cloudpickle.dumps((function(*args), None))
            except BaseException as error:
                outcome = cloudpickle.dumps((None, error))
            connection.send_bytes(outcome)
