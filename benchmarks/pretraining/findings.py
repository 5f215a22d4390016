"""What the record's frames say, as tables: the dip of the entropy, when layers settle, the best layer, what tuning changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from midlayer_encoders.frame import FRAME_SCHEMA, histories, settled, step_of

RESULTS = Path(__file__).parent / "results"
OBJECTIVES = ("causal", "masked", "ssm")
TUNINGS = ("simcse", "supervised")
THIRDS = {"1 to 4": range(1, 5), "5 to 8": range(5, 9), "9 to 12": range(9, 13)}


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


def mean_scores(frame: pl.DataFrame) -> dict[int, list[float]]:
    """Return the mean of the tasks' scores x 100 over the layers at each stage."""
    means = (
        frame.filter(pl.col("kind") == "score").group_by("revision", "layer").agg(value=100 * pl.col("value").mean())
    )
    stages = sorted(means["revision"].unique(), key=step_of)
    return {step_of(stage): means.filter(revision=stage).sort("layer")["value"].to_list() for stage in stages}


def dip(values: list[float]) -> tuple[int, float]:
    """Return the layer of the lowest value between the first and the last, and how far it lies below both.

    Example:
        >>> dip([4.0, 3.0, 2.5, 3.5])
        (2, 1.0)
    """
    layer = min(range(1, len(values) - 1), key=values.__getitem__)
    return layer, min(values[0], values[-1]) - values[layer]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]) + "\n"


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
        ["run", "in blocks", "steps", "training", "measurements", "tasks", "first loss", "last loss", "held out"], rows
    )


def dip_table(name: str = "prompt_entropy", steps: tuple[int, ...] = (0, 16, 64, 128, 256, 512, 1024)) -> str:
    rows = []
    for objective in OBJECTIVES:
        values = by_layer(read_frame(objective), name)
        cells = [(dip(values[step]), values[step]) for step in steps]
        rows.append([objective, *(f"{depth:+.2f} at {layer}" if depth > 0 else "none" for (layer, depth), _ in cells)])
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


def best_table() -> str:
    rows = []
    for name in (*OBJECTIVES, *TUNINGS):
        for step, scores in mean_scores(read_frame(name)).items():
            inner = max(range(1, len(scores)), key=scores.__getitem__)
            cells = [f"{scores[0]:.1f}", f"{scores[inner]:.1f} at {inner}", f"{scores[-1]:.1f}"]
            rows.append([name, str(step), *cells, f"{scores[inner] - scores[-1]:+.1f}"])
    return table(["run", "step", "embeddings", "best of layers 1 to 12", "last", "best over last"], rows)


def task_table() -> str:
    rows = []
    for name in (*OBJECTIVES, *TUNINGS):
        frame = read_frame(name).filter(pl.col("kind") == "score")
        last = max(frame["revision"].unique(), key=step_of)
        cells = []
        for _, one in frame.filter(revision=last).sort("dataset", "layer").group_by("dataset", maintain_order=True):
            scores = [100 * value for value in one["value"]]
            inner = max(range(1, len(scores)), key=scores.__getitem__)
            cells.append(f"{scores[0]:.1f}, {scores[inner]:.1f} at {inner}, {scores[-1]:.1f}")
        rows.append([name, *cells])
    return table(["run", *sorted(frame["dataset"].unique())], rows)


def tuning_table(layers: tuple[int, ...] = (1, 6, 9, 12)) -> str:
    rows = []
    for name in ("prompt_entropy", "dataset_entropy", "effective_rank", "infonce", "dime", "lidar", "anisotropy"):
        for tuning in TUNINGS:
            values = by_layer(read_frame(tuning), name)
            before, after = values[min(values)], values[max(values)]
            rows.append([name, tuning, *(f"{before[k]:.2f} → {after[k]:.2f}" for k in layers)])
    return table(["metric", "tuning", *(f"layer {k}" for k in layers)], rows)


def main() -> None:
    for made in (run_table(), dip_table(), settled_table(), best_table(), task_table(), tuning_table()):
        print(made)


if __name__ == "__main__":
    main()
