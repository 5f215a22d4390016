"""Compare the best layer on samples with that on all rows: MiniLM on two tasks of real data.

Needs the tasks at ``MIDLAYER_DATA/tasks``. Every sweep has a store of its own. Writes ``benchmarks/results/limits.md``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.data import data_folder
from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders.frame.summaries import score_interval
from midlayer_encoders.models.hub import BUILT_IN_MINILM
from midlayer_encoders.sweeping import SweepSettings

DATA = (data_folder() or Path(__file__).parents[2] / "shared" / "data") / "tasks"
RESULT = Path(__file__).parent / "results" / "limits.md"
TASKS = ("EmotionClassification", "STSBenchmark")
HEAD = """# Samples against all rows

`python -m benchmarks.limits`: all-MiniLM-L6-v2 (6 blocks), float32, at most 128 tokens, on a shared CPU with two cores.
One process, without baselines and metrics; each sweep has its own store, and its time, which includes mteb's
confirmation, is given as a share of the time on all rows. "Full score" is that of the chosen layer on all rows. The interval covers
the choice of test rows, not that of training rows.

| task | rows | best layer | score on the sample (95 % interval) | gain over the last layer | full score | inside | best layer of all rows | time |
|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", type=int, nargs="+", default=[100, 200, 400])
    args = parser.parse_args()
    encoder = LayerEncoder(BUILT_IN_MINILM, -1, max_length=128, device="cpu")
    rows: list[str] = []
    for task in TASKS:
        path = DATA / task
        requests: dict[str, dict[str, Any]] = {"all": {}}
        requests |= {str(limit): {"limit": limit} for limit in args.limits}
        for name, request in requests.items():
            with tempfile.TemporaryDirectory() as out:
                start = time.perf_counter()
                result = sweep(encoder, path, out=out, baselines=False, settings=SweepSettings(workers=1), **request)
                seconds = time.perf_counter() - start
            if name == "all":
                full, full_seconds = result.curves.average, seconds
            best, summary = result.best(), result.curves
            low, high = score_interval(summary, result.resamples, best.layer)
            gain = f"{best.gain.points:+.1f} ({best.gain.low:+.1f} to {best.gain.high:+.1f})"
            score = full.points[best.layer]
            rows.append(
                f"| {task} | {name} | {best.layer} | {best.score:.1f} ({low:.1f} to {high:.1f}) | {gain} | {score:.1f} | "
                f"{'yes' if low <= score <= high else 'no'} | {full.best_layer} ({full.best:.1f}) | "
                f"{seconds / full_seconds:.2f} |"
            )
            print(rows[-1], f"{seconds:.0f} s", flush=True)
    RESULT.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
