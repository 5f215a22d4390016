"""Draw the record: ``python -m benchmarks.pretraining.report`` writes ``docs/figures/training/`` and prints the tables."""

from __future__ import annotations

from math import log2
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.pretraining import findings
from benchmarks.pretraining.findings import OBJECTIVES, TUNINGS, by_layer, mean_scores, read_frame, read_runs
from midlayer_encoders.frame import settled
from midlayer_encoders.frame.steps import step_word
from midlayer_encoders.report import plot_steps_heat
from midlayer_encoders.report.axes import Axis, layer_axis
from midlayer_encoders.report.charts import Chart, Dots, Line, Panel, Part, value_axis
from midlayer_encoders.report.matplotlib_figures import draw

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "training"
SHOWN = (0, 16, 64, 128, 256, 512, 1024)


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
    return draw(Chart(tuple(panels), columns=len(panels), size=(3.5, 2.8)))


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
    return draw(Chart(tuple(panels), size=(3.5, 2.6)))


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
    return draw(Chart(tuple(panels), columns=len(panels), size=(3.1, 2.6)))


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
    return draw(Chart((panel,), size=(6.4, 3.3)))


def figures() -> dict[str, Any]:
    frames = {name: read_frame(name) for name in OBJECTIVES}
    entropy = {
        name: {step: curve for step, curve in by_layer(frame, "prompt_entropy").items() if step in SHOWN}
        for name, frame in frames.items()
    }
    made = {f"heat_{name}": plot_steps_heat(frame.filter(pl.col("kind") == "metric")) for name, frame in frames.items()}
    return made | {
        "entropy": by_objective(entropy, "prompt entropy, nats"),
        "scores": by_objective({name: mean_scores(frame) for name, frame in frames.items()}, "mean score", marks=True),
        "settling": settling(),
        "finetuning": tuning(),
        "losses": losses(),
    }


def main() -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, figure in figures().items():
        figure.savefig(FIGURES / f"{name}.png", dpi=110)
    findings.main()


if __name__ == "__main__":
    main()
