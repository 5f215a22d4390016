"""Embed texts as units on processes of this machine, compare with one process, and simulate more workers.

``python -m benchmarks.speed.units --texts 24576`` writes ``benchmarks/results/units.md``. The processes have loaded the model before
the clock starts. Times are of the processor, so that other programs on the machine do not count. More workers are
simulated by giving each the next unit as soon as it is free, with the measured times of the units, repeated until they
hold as many texts as ``--simulated``.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.data import RESULTS
from benchmarks.pages import table
from benchmarks.timing import device_name
from midlayer_encoders import embed
from midlayer_encoders.extras.scaling import Processes


class Timed:
    """An executor of this process that keeps the time of each unit."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def submit(self, function: Callable[[Any], Any], unit: Any) -> Future[Any]:
        """Call the function."""
        start, future = time.process_time(), Future[Any]()
        future.set_result(function(unit))
        self.seconds.setdefault(unit.step, []).append(time.process_time() - start)
        return future


def makespan(seconds: Sequence[float], workers: int) -> float:
    """Return when the last of some workers ends, each of which takes the next unit when it is free.

    Example:
        >>> makespan([2, 1, 1, 1], 2)
        3
    """
    free = [0.0] * workers
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def processor_seconds(processes: Processes) -> float:
    """Return the processor time of this process and of an executor's."""

    def wait(seconds: float) -> float:
        time.sleep(seconds)  # so that each process answers once
        return time.process_time()

    futures = [processes.submit(wait, 0.5) for _ in range(processes.count)]
    return time.process_time() + sum(future.result() for future in futures)


def peak_megabytes() -> float:
    """Return the peak of this process's memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="built-in-minilm")
    parser.add_argument("--texts", type=int, default=24_576)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--simulated", type=int, default=1_000_000)
    given = parser.parse_args()
    texts = [
        f"Line {n} of a made text, which speaks of {n % 97} apples and {n % 89} pears." for n in range(given.texts)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(file: str, count: int, executor: Any) -> None:
            embed(given.model, texts[:count], folder / file, layers=[-1], device="cpu", executor=executor)

        with Processes(given.processes) as shared:
            run("warm.npy", 64 * given.processes, shared)
            run("some.npy", given.texts // 2, shared)
            half, start = peak_megabytes(), processor_seconds(shared)
            run("many.npy", given.texts, shared)
            together, driver = processor_seconds(shared) - start, peak_megabytes()
        timed = Timed()
        run("warm2.npy", 64, timed)
        timed.seconds.clear()
        start = time.process_time()
        run("one.npy", given.texts, timed)
        alone = time.process_time() - start
        equal = (folder / "one.npy").read_bytes() == (folder / "many.npy").read_bytes()
    blocks = timed.seconds["embed"]
    total = given.simulated * len(blocks) // given.texts
    repeated = list(itertools.islice(itertools.cycle(blocks), total))
    rows = [[workers, f"{makespan(repeated, workers) * workers / sum(repeated):.3f}"] for workers in (4, 16, 64, 256)]
    page = f"""# Units on several processes

`python -m benchmarks.speed.units --texts {given.texts}`: {given.texts:,} made texts, {given.model}, {device_name("cpu")}, one thread a
process. The processes had loaded the model. Times are of the processor.

| | |
|---|---|
| one process, s | {alone:.1f} |
| {given.processes} processes and their driver, s | {together:.1f} |
| of the time of one | {together / alone:.2f} |
| the same file, to the byte | {"yes" if equal else "no"} |
| peak of the driver with {given.texts // 2:,} texts, and with {given.texts:,}, MB | {half:.0f}, {driver:.0f} |

Blocks of a million texts like these, on more workers, simulated with the measured times of {len(blocks)} blocks: workers x the
time of the last, of the sum of all times.

{table(["workers", "ratio"], rows)}"""
    (RESULTS / "units.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
