"""Draw the record: ``python -m benchmarks.pretraining.report`` writes ``docs/figures/training/`` and prints the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.pretraining import findings
from benchmarks.pretraining.findings import OBJECTIVES, TUNINGS, by_layer, mean_scores, read_frame, read_runs
from midlayer_encoders.frame import settled
from midlayer_encoders.frame.steps import step_word
from midlayer_encoders.report import plot_steps_heat
from midlayer_encoders.report.axes import BEST, SOFT, grid, layer_axis
from midlayer_encoders.report.steps import step_colours
from midlayer_encoders.report.style import SERIES

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "training"
SHOWN = (0, 16, 64, 128, 256, 512, 1024)


def by_objective(values: dict[str, dict[int, list[float]]], title: str, *, marks: bool = False) -> Any:
    """Return a panel for each objective with a curve for each step, on one scale; ``marks`` for each best layer after 0."""
    figure, panels = grid(len(values), columns=len(values))
    figure.set_size_inches(10.5, 3.4)
    every = sorted({step for curves in values.values() for step in curves})
    colours = step_colours(len(every))
    for axes, (objective, curves) in zip(panels, values.items(), strict=True):
        for step, curve in curves.items():
            colour = colours(every.index(step))
            axes.plot(range(len(curve)), curve, color=colour, linewidth=1.6, marker="o", markersize=2.2)
            if marks:
                best = max(range(1, len(curve)), key=curve.__getitem__)
                axes.plot(best, curve[best], marker="o", markersize=6, markerfacecolor="none", color=BEST)
        axes.set_title(f"{objective}: {title}", loc="left", fontsize=10)
        layer_axis(axes, len(curve) - 1)
        axes.sharey(panels[0])
    handles = [panels[0].plot([], [], color=colours(k))[0] for k in range(len(every))]
    figure.legend(
        handles, [f"step {step_word(step)}" for step in every], loc="outside lower center", ncols=len(every),
        fontsize=8, frameon=False, labelcolor=SOFT,
    )  # fmt: skip
    return figure


def settling() -> Any:
    """Return a panel for each metric: from which step on a layer stays within a tenth of the metric's range."""
    names = ("prompt_entropy", "dataset_entropy", "infonce")
    figure, panels = grid(len(names), columns=len(names))
    figure.set_size_inches(10.5, 3.2)
    for axes, name in zip(panels, names, strict=True):
        for place, objective in enumerate(OBJECTIVES):
            found = settled(read_frame(objective).filter(pl.col("name") == name), within=0.1).sort("layer")
            axes.plot(found["layer"], found["step"], color=SERIES[place], marker="o", markersize=3, label=objective)
        axes.set_yscale("symlog", base=2, linthresh=16)
        axes.set_yticks([0, 16, 64, 256, 1024], ["0", "16", "64", "256", "1024"])
        axes.minorticks_off()
        axes.set_title(f"{name}: settled from step", loc="left", fontsize=10)
        layer_axis(axes, 12)
    panels[0].legend(fontsize=8, frameon=False, labelcolor=SOFT)
    return figure


def tuning() -> Any:
    """Return the causal model before and after each fine-tuning: three metrics and the mean score."""
    names = ("prompt_entropy", "dataset_entropy", "infonce", "mean score")
    figure, panels = grid(len(names), columns=len(names))
    figure.set_size_inches(12.5, 3.2)
    frames = {name: read_frame(name) for name in TUNINGS}
    for axes, name in zip(panels, names, strict=True):
        curves = {
            tuned: mean_scores(frame) if name == "mean score" else by_layer(frame, name)
            for tuned, frame in frames.items()
        }
        first = curves[TUNINGS[0]]
        axes.plot(first[min(first)], color=SOFT, linewidth=1.6, marker="o", markersize=2.5, label="before")
        for place, (tuned, steps) in enumerate(curves.items()):
            axes.plot(steps[max(steps)], color=SERIES[place], linewidth=1.6, marker="o", markersize=2.5, label=tuned)
        axes.set_title(name, loc="left", fontsize=10)
        layer_axis(axes, 12)
    panels[0].legend(fontsize=8, frameon=False, labelcolor=SOFT)
    return figure


def losses() -> Any:
    """Return the training loss by step, smoothed over 16 steps, and the held-out loss."""
    figure, (axes,) = grid(1, columns=1)
    figure.set_size_inches(6.4, 3.6)
    for place, name in enumerate(OBJECTIVES):
        run = read_runs()[name]
        smooth = pl.Series(run["losses"]).rolling_mean(16, min_samples=1)
        axes.plot(range(1, len(smooth) + 1), smooth, color=SERIES[place], linewidth=1.2, label=name)
        held = {int(step): loss for step, loss in run["held_out"].items() if int(step)}
        axes.plot(list(held), list(held.values()), "o", markersize=4, color=SERIES[place])
    layer_axis(axes, 1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, 1200)
    axes.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
    axes.set_xlabel("step", fontsize=8, color=SOFT)
    axes.set_title("loss, nats a token (points: held out)", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False, labelcolor=SOFT)
    return figure


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
