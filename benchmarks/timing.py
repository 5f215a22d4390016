"""How benchmarks are timed: rounds alternate, so that other programs slow all parts equally, and a GPU is idle around each."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "alternate",
    "device_name",
    "fastest",
    "forget_cached",
    "host_memory",
    "peak",
    "timed",
    "usual_clock",
    "wait",
]


def usual_clock() -> float:
    """Return seconds by the clock on a GPU; elsewhere the processor's, which other programs change least."""
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call."""
    wait()
    start = clock()
    run()
    wait()
    return clock() - start


def fastest(run: Callable[[], Any], rounds: int) -> float:
    """Return the seconds of the fastest of some calls."""
    return min(timed(run) for _ in range(rounds))


def alternate(
    runs: Mapping[str, Callable[[], Any]], rounds: int = 3, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the seconds of the fastest of some alternating rounds, by the name of what ran."""
    found = [{name: timed(run, clock) for name, run in runs.items()} for _ in range(rounds)]
    return {name: min(one[name] for one in found) for name in runs}


def peak(run: Callable[[], Any]) -> float:
    """Return the peak of the device's memory during a call, in GB; NaN without one."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run()
    wait()
    return torch.cuda.max_memory_allocated() / 1e9 if cuda else float("nan")


def host_memory(name: str = "VmHWM") -> float:
    """Return this process's peak memory in MB, or what it has now by ``"VmRSS"``."""
    # Not `ru_maxrss`, which a child inherits from the process that started it.
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3  # type: ignore[index]


def forget_cached(folder: Path) -> None:
    """Ask the system to drop the folder's files from its cache, so that the next read comes from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def device_name(device: str) -> str:
    """Return the GPU's name, or the number of CPU cores."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"{os.cpu_count()} CPU cores"


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
