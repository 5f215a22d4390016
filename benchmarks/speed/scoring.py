"""Score every layer of a model together and by mteb, from the same vectors, and compare scores and times.

``python -m benchmarks.speed.scoring --model SmolLM2-135M --tasks builtin`` and ``--model all-MiniLM-L6-v2 --tasks real`` (which needs
the tasks at ``MIDLAYER_DATA/tasks``; ``--rows`` samples their files at equal steps). Each run replaces its section of
``benchmarks/results/scoring.md``. Vectors are embedded first and not timed; both ways then run in the same process, one after
the other, mteb's in ``--workers`` processes. ``--mteb-layers`` has mteb score some layers only, and its time taken for all of them. On a
machine that others use, compare seconds of the processor: ``OMP_NUM_THREADS=1 python -m benchmarks.speed.scoring … --workers 1``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import joblib
import polars as pl
import torch

from benchmarks.data import RESULTS
from benchmarks.pages import table
from benchmarks.quality.real_tasks import MODELS, shortened
from benchmarks.timing import device_name
from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders.sweeping import SweepResult, SweepSettings
from midlayer_encoders.sweeping.scoring import recording  # noqa: F401  (imported before anything is timed)

PAGE = RESULTS / "scoring.md"
HEAD = """# Scoring all layers of a task together, compared with mteb

How close the sweep's scores are to mteb's, and how much time they take. Scores are main scores x 100. A difference is our
score minus mteb's, at the layer where it is largest. Times cover scoring only, from stored vectors.
"""


def encoder_of(model: str, device: str) -> LayerEncoder:
    return LayerEncoder(MODELS[model], -1, max_length=128, dtype="float32", device=device)


class Clock:
    """A progress callback that knows how long each stage took."""

    def __init__(self) -> None:
        self.first: dict[str, tuple[float, float]] = {}
        self.last: dict[str, tuple[float, float]] = {}

    def __call__(self, stage: str, *_: int) -> None:
        now = time.perf_counter(), time.process_time()
        self.first.setdefault(stage, now)
        self.last[stage] = now

    def seconds(self, stage: str, *, cpu: bool = False) -> float:
        if stage not in self.first:
            return 0.0
        return self.last[stage][cpu] - self.first[stage][cpu]


def timed(
    encoder: LayerEncoder, tasks: Any, store: Path, workers: int, scoring: Any, layers: Any
) -> tuple[SweepResult, Clock]:
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        result = sweep(
            encoder, tasks, layers=layers, out=Path(out), store=store, baselines=False, progress=clock,
            settings=SweepSettings(scoring=scoring, workers=workers),
        )  # fmt: skip
    assert not result.failures, result.failures
    return result, clock


def compared(together: SweepResult, mteb: SweepResult) -> pl.DataFrame:
    keys = ["dataset", "name", "layer", "value"]
    both = together.frame.filter(kind="score").select(keys).join(
        mteb.frame.filter(kind="score").select(keys), on=keys[:3], suffix="_mteb"
    )  # fmt: skip
    return both.with_columns((100 * (pl.col("value") - pl.col("value_mteb"))).alias("difference"))


def task_table(both: pl.DataFrame) -> str:
    rows = []
    for (task,), mine in both.group_by("dataset", maintain_order=True):
        sizes = mine["difference"].abs()
        largest = mine["difference"][int(sizes.arg_max() or 0)]
        name = re.sub(r"-[0-9a-f]{8}$", "", str(task))
        rows.append([name, mine["name"][0], len(mine), f"{largest:+.4f}", f"{sizes.mean():.5f}"])
    return table(["task", "main score", "layers", "largest difference", "mean absolute difference"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--tasks", choices=["builtin", "real"], required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--only", nargs="*", default=None, help="names of some of the real tasks")
    parser.add_argument("--layers", default="all")
    parser.add_argument("--mteb-layers", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=joblib.cpu_count())
    parser.add_argument("--store", type=Path, default=Path("runs/scoring"))
    given = parser.parse_args()
    layers = "all" if given.layers == "all" else [int(layer) for layer in given.layers.split(",")]
    encoder = encoder_of(given.model, given.device)
    with tempfile.TemporaryDirectory() as root:
        tasks: Any = "builtin" if given.tasks == "builtin" else shortened(Path(root), given.rows)
        if given.only:
            tasks = [path for path in tasks if path.name in given.only]
        store = given.store / given.model
        together, ours = timed(encoder, tasks, store, given.workers, "together", layers)
        if "embedding" in ours.first:  # that was not scoring alone
            together, ours = timed(encoder, tasks, store, given.workers, "together", layers)
        some = layers if given.mteb_layers is None else [int(layer) for layer in given.mteb_layers.split(",")]
        by_mteb, theirs = timed(encoder, tasks, store, given.workers, "mteb", some)
    seconds, confirming = ours.seconds("scoring"), ours.seconds("confirming")
    part = by_mteb.frame["layer"].n_unique() / together.frame["layer"].n_unique()
    slow = theirs.seconds("scoring") / part
    processor = [ours.seconds("scoring", cpu=True), theirs.seconds("scoring", cpu=True) / part]
    rows = f", about {given.rows} rows of each file" if given.rows < 100_000 and given.tasks == "real" else ""
    which = f"{given.tasks} tasks" if not given.only else ", ".join(given.only)
    title = f"## {given.model}, {which}{rows}, {given.device}"
    lines = [
        title, "", f"`python -m benchmarks.speed.scoring {' '.join(sys.argv[1:])}`, {device_name(given.device)}, {torch.get_num_threads()} threads:", "",
        f"All layers together {seconds:.1f} s; mteb {slow:.1f} s with {given.workers} workers: **{slow / seconds:.1f} times** as long. "
        f"Confirmation by mteb takes another {confirming:.1f} s."
        + (f" CPU seconds: {processor[0]:.1f} and {processor[1]:.1f}, **{processor[1] / processor[0]:.1f} times**." if given.workers == 1 else "")
        + (f" mteb's times are extrapolated from the layers {given.mteb_layers}." if part < 1 else ""), "",
        task_table(compared(together, by_mteb)),
    ]  # fmt: skip
    print("\n".join(lines))
    text = PAGE.read_text() if PAGE.exists() else HEAD
    parts = [part for part in re.split(r"(?m)^(?=## )", text) if part.strip()]
    parts = [part for part in parts if not part.startswith(title + "\n")]
    PAGE.write_text("\n".join(part.strip() + "\n" for part in [*parts, "\n".join(lines)]))


if __name__ == "__main__":
    main()
