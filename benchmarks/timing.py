"""How benchmarks that run on a GPU are timed: the device idle before and after what is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["fastest", "forget_cached", "peak", "timed"]


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    _wait()
    start = time.perf_counter()
    run()
    _wait()
    return time.perf_counter() - start


def fastest(run: Callable[[], Any], rounds: int) -> float:
    """Return the seconds of the fastest of some calls."""
    return min(timed(run) for _ in range(rounds))


def peak(run: Callable[[], Any]) -> float:
    """Return the peak of the device's memory during a call, in GB; NaN without one."""
    if not torch.cuda.is_available():
        return float("nan")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    _wait()
    return torch.cuda.max_memory_allocated() / 1e9


def forget_cached(folder: Path) -> None:
    """Ask the system to drop the folder's files from its cache, so that the next read comes from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
