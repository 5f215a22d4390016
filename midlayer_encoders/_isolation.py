"""Isolation from global settings: random generators, the precision of products, and globals of other libraries."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

_lock = threading.RLock()  # all threads of a process share the generators


def _reset_lock() -> None:
    """Replace the lock in a forked child, where the thread that held it does not exist."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_lock)


@contextmanager
def isolated_random() -> Iterator[None]:
    """Restore the global generators of ``random``, NumPy and torch when the block ends.

    Only one thread at a time runs such a block.

    Example:
        >>> import random
        >>> random.seed(0)
        >>> with isolated_random():
        ...     random.seed(42)
        >>> round(random.random(), 4)
        0.8444
    """
    import random

    import numpy as np
    import torch  # mteb seeds torch only if torch is already imported

    with _lock:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])
            if cuda:
                torch.cuda.set_rng_state_all(cuda)


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Disable autocast and TF32 for the products inside; the rounding of TF32 would reorder close similarities."""
    import torch

    before = torch.get_float32_matmul_precision()
    with torch.autocast(device_type, enabled=False):
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def with_globals(function: Any, **names: Any) -> Any:
    """Return a copy of a function with other values of some globals; its module stays unchanged."""
    namespace = {**function.__globals__, **names}
    other = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    other.__kwdefaults__ = function.__kwdefaults__
    return other


def limit_cores(cores: int = 1) -> None:
    """Keep this thread from starting more OpenMP threads.

    OpenMP threads spin while they wait for work: on 16 cores, 16 threads of 16 made the decompositions of one layer
    five times slower. Unlike ``torch.set_num_threads``, the limit affects only this thread. It is set once because
    setting it takes as long as a few decompositions.
    """
    import torch

    torch.get_num_threads()  # initializes torch's number in this thread, which would later override the limit
    with _searching:  # it takes a second, so that several threads must not search at once
        _libraries().limit(limits=cores, user_api="openmp")


_searching = threading.Lock()


@cache
def _libraries() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


def usable_cores() -> int:
    """Return the number of cores of this process: its affinity, its cgroup, SLURM and LOKY_MAX_CPU_COUNT limit it."""
    import joblib

    limits = [int(os.environ.get(name) or 0) for name in ("SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK")]
    return max(min(filter(None, [int(joblib.cpu_count()), *limits])), 1)
