"""The first record, 67M tokens without BOS: ``python -m benchmarks.pretraining.first`` draws it and prints its tables.

Reads ``results/first``, writes ``docs/figures/training_first/``; ``docs/training_first.md`` tells what it showed.
"""

from __future__ import annotations

import json
from math import log2
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.intervals import mean_cell
from benchmarks.panels import Axis, Dots, Line, Panel, Part, draw, layer_axis, value_axis
from benchmarks.pretraining.findings import THIRDS, valley
from benchmarks.pretraining.tables import table
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.frame.steps import histories, settled, step_of, step_word
from midlayer_encoders.report import drawing

RESULTS = Path(__file__).parent / "results" / "first"
FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "training_first"
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


def mean_scores(frame: pl.DataFrame) -> dict[int, list[float]]:
    """Return the mean of the tasks' scores x 100 over the layers at each stage."""
    means = (
        frame.filter(pl.col("kind") == "score").group_by("revision", "layer").agg(value=100 * pl.col("value").mean())
    )
    stages = sorted(means["revision"].unique(), key=step_of)
    return {step_of(stage): means.filter(revision=stage).sort("layer")["value"].to_list() for stage in stages}


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


def curve(values: list[float], label: str = "", style: int = 0) -> Line:
    return Line(tuple(range(len(values))), tuple(values), label, style)


def by_objective(values: dict[str, dict[int, list[float]]], title: str, *, marks: bool = False) -> Any:
    """Return a panel for each objective with a curve for each step, on one scale; ``marks`` for each best layer after 0."""
    every = sorted({step for curves in values.values() for step in curves})
    up = value_axis([curve(one) for curves in values.values() for one in curves.values()])
    panels = []
    for objective, curves in values.items():
        parts: list[Part] = []
        for step, one in curves.items():
            parts.append(curve(one, f"step {step_word(step)}", every.index(step)))
            if marks:
                best = max(range(1, len(one)), key=one.__getitem__)
                parts.append(Dots((best,), (one[best],), "ring", style=every.index(step)))
        across = layer_axis(len(one) - 1)
        panels.append(Panel(f"{objective}: {title}", across, up, tuple(parts), ordered=len(every)))
    return draw(panels, columns=len(panels), size=(3.5, 2.8))


def settling() -> Any:
    """Return a panel for each metric: from which step on a layer stays within a tenth of the metric's range."""
    panels = []
    for name in ("prompt_entropy", "dataset_entropy", "infonce"):
        found = {
            objective: settled(read_frame(objective).filter(pl.col("name") == name), within=0.1).sort("layer")
            for objective in OBJECTIVES
        }
        # Steps double: each stands at its logarithm, the first at the left of 16.
        lines = tuple(
            Line(tuple(rows["layer"]), tuple(log2(max(step, 8)) for step in rows["step"]), objective, place)
            for place, (objective, rows) in enumerate(found.items())
        )
        ticks = ((3, "0"), (4, "16"), (6, "64"), (8, "256"), (10, "1024"))
        panels.append(Panel(f"{name}: settled from step", layer_axis(12), Axis("", 2.7, 10.3, ticks), lines))
    return draw(panels, size=(3.5, 2.6))


def tuning() -> Any:
    """Return the causal model before and after each fine-tuning: three metrics and the mean score."""
    frames = {name: read_frame(name) for name in TUNINGS}
    panels = []
    for name in ("prompt_entropy", "dataset_entropy", "infonce", "mean score"):
        curves = {
            tuned: mean_scores(frame) if name == "mean score" else by_layer(frame, name)
            for tuned, frame in frames.items()
        }
        first = curves[TUNINGS[0]]
        after = (curve(steps[max(steps)], tuned, place) for place, (tuned, steps) in enumerate(curves.items()))
        lines = (curve(first[min(first)], "before", 4), *after)
        panels.append(Panel(name, layer_axis(12), value_axis(lines), lines))
    return draw(panels, columns=len(panels), size=(3.1, 2.6))


def losses() -> Any:
    """Return the training loss by step, smoothed over 16 steps, and the held-out loss."""
    parts: list[Part] = []
    for place, name in enumerate(OBJECTIVES):
        run = read_runs()[name]
        smooth = pl.Series(run["losses"]).rolling_mean(16, min_samples=1)
        parts.append(Line(tuple(range(1, len(smooth) + 1)), tuple(smooth), name, place))
        held = {int(step): loss for step, loss in run["held_out"].items() if int(step)}
        parts.append(Dots(tuple(held), tuple(held.values()), style=place))
    across = Axis("step", 1, 1200, tuple((step, str(step)) for step in (1, 4, 16, 64, 256, 1024)), log=True)
    panel = Panel("loss, nats a token (points: held out)", across, value_axis(parts), tuple(parts))
    return draw([panel], size=(6.4, 3.3))


def heat(frame: pl.DataFrame) -> Any:
    """Return a heat map for each metric: layers upward, steps to the right, equally spaced."""
    measured = histories(frame)
    figure, panels = drawing.panel_grid(len(measured))
    for axes, history in zip(panels, measured, strict=True):
        axes.grid(visible=False)
        image = axes.imshow(history.values.T, cmap="Blues", origin="lower", aspect="auto")
        figure.colorbar(image, ax=axes, pad=0.02)
        axes.set(xlabel="step", ylabel="layer")
        axes.set_xticks(range(0, len(history.steps), 4), [step_word(step) for step in history.steps[::4]])
        drawing.set_title(axes, history.title)
    return drawing.finish(figure)


def figures() -> dict[str, Any]:
    frames = {name: read_frame(name) for name in OBJECTIVES}
    entropy = {
        name: {step: curve for step, curve in by_layer(frame, "prompt_entropy").items() if step in SHOWN}
        for name, frame in frames.items()
    }
    made = {f"heat_{name}": heat(frame.filter(pl.col("kind") == "metric")) for name, frame in frames.items()}
    return made | {
        "entropy": by_objective(entropy, "prompt entropy, nats"),
        "scores": by_objective({name: mean_scores(frame) for name, frame in frames.items()}, "mean score", marks=True),
        "settling": settling(),
        "finetuning": tuning(),
        "losses": losses(),
    }


def tables() -> tuple[str, ...]:
    """Return the tables of the page."""
    return run_table(), dip_table(), settled_table(), best_table(), tuning_table()


def main() -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, figure in figures().items():
        figure.savefig(FIGURES / f"{name}.png", dpi=110)
    print(*tables(), sep="\n")


if __name__ == "__main__":
    main()
