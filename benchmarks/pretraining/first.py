"""The tables of the first record, 67M tokens without BOS, which stand in ``benchmarks/results/training_first.md``.

``python -m benchmarks.pretraining.first`` prints them from ``results/first``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.intervals import mean_cell
from benchmarks.pages import table
from benchmarks.pretraining.findings import THIRDS, valley
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.frame.steps import histories, settled, step_of

RESULTS = Path(__file__).parent / "results" / "first"
OBJECTIVES = ("causal", "masked", "ssm")
TUNINGS = ("simcse", "supervised")
SHOWN = (0, 16, 64, 128, 256, 512, 1024)


def read_frame(name: str) -> pl.DataFrame:
    """Return the tidy frame of a run."""
    return pl.read_csv(RESULTS / f"{name}.csv", schema=FRAME_SCHEMA)


def read_runs() -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = json.loads((RESULTS / "runs.json").read_text())
    return runs


def by_layer(frame: pl.DataFrame, name: str) -> dict[int, list[float]]:
    """Return the values of a metric over the layers at each step."""
    (one,) = histories(frame.filter(pl.col("name") == name))
    return dict(zip(one.steps, one.values.tolist(), strict=True))


def run_table() -> str:
    rows = []
    for name, run in read_runs().items():
        held = list(run["held_out"].values())
        training = run["seconds"] - run["look_seconds"] - run["stage_seconds"]
        end = sum(run["losses"][-20:]) / 20
        rows.append([
            name, f"{run['block_parameters'] / 1e6:.1f}M", str(run["steps"]), f"{training:.0f} s",
            f"{run['look_seconds']:.1f} s", f"{run['stage_seconds']:.1f} s", f"{run['losses'][0]:.2f}", f"{end:.3f}",
            f"{held[-1]:.3f}" if held else "",
        ])  # fmt: skip
    return table(
        [
            "run",
            "block parameters",
            "steps",
            "training",
            "measurements",
            "tasks",
            "initial loss",
            "final loss",
            "held-out loss",
        ],
        rows,
    )


def dip_table(name: str = "prompt_entropy", steps: tuple[int, ...] = SHOWN) -> str:
    rows = []
    for objective in OBJECTIVES:
        values = by_layer(read_frame(objective), name)
        found = [valley(values[step]) for step in steps]
        rows.append([objective, *(f"{one.depth:+.2f} at {one.layer}" if one.depth > 0 else "none" for one in found)])
    return table([name, *(f"step {step}" for step in steps)], rows)


def settled_table(
    names: tuple[str, ...] = ("prompt_entropy", "dataset_entropy", "curvature", "infonce", "dime"),
) -> str:
    rows = []
    for objective in OBJECTIVES:
        found = settled(read_frame(objective).filter(pl.col("name").is_in(names)), within=0.1)
        for name in names:
            steps = dict(found.filter(name=name).select("layer", "step").iter_rows())
            thirds = [f"{sum(steps[k] for k in layers) / len(layers):.0f}" for layers in THIRDS.values()]
            rows.append([objective, name, str(steps[0]), *thirds])
    return table(["objective", "metric", "layer 0", *(f"layers {third}" for third in THIRDS)], rows)


def last_stage(name: str) -> pl.DataFrame:
    """Return a run's score x 100 on each task at its last stage, a column for each layer."""
    frame = read_frame(name).filter(pl.col("kind") == "score")
    last = max(frame["revision"].unique(), key=step_of)
    frame = frame.filter(revision=last).with_columns(value=100 * pl.col("value")).sort("dataset", "layer")
    return frame.pivot("layer", index="dataset", values="value").drop("dataset")


def best_table() -> str:
    """Return each run's mean scores at the end, and the gains of its best block with intervals over the tasks."""
    rows = []
    for name in (*OBJECTIVES, *TUNINGS):
        scores = last_stage(name)
        means = scores.mean().row(0)
        inner = max(range(1, len(means)), key=means.__getitem__)
        cells = [f"{means[0]:.1f}", f"{means[inner]:.1f} at {inner}", f"{means[-1]:.1f}"]
        gains = (scores[str(inner)] - scores[other] for other in ("0", str(len(means) - 1)))
        rows.append([name, *cells, *(mean_cell(gain.to_list(), "+.1f") for gain in gains)])
    head = ["run", "embeddings", "best of layers 1 to 12", "last", "best over embeddings", "best over last"]
    return table(head, rows)


def tuning_table(layers: tuple[int, ...] = (1, 6, 9, 12)) -> str:
    rows = []
    for name in ("prompt_entropy", "dataset_entropy", "effective_rank", "infonce", "dime", "lidar", "anisotropy"):
        for tuning in TUNINGS:
            values = by_layer(read_frame(tuning), name)
            before, after = values[min(values)], values[max(values)]
            rows.append([name, tuning, *(f"{before[k]:.2f} → {after[k]:.2f}" for k in layers)])
    return table(["metric", "tuning", *(f"layer {k}" for k in layers)], rows)


def tables() -> tuple[str, ...]:
    """Return the tables of the page."""
    return run_table(), dip_table(), settled_table(), best_table(), tuning_table()


if __name__ == "__main__":
    print(*tables(), sep="\n")
