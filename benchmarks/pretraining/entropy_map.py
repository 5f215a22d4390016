"""The headline of the training record: the entropy over layers and tokens as a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from benchmarks.pretraining.findings import RAW, event
from benchmarks.pretraining.record import TOKENS, Run, read_run
from midlayer_encoders.frame.steps import histories
from midlayer_encoders.report.style import LIGHT, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

__all__ = ["headline"]

COLORED = 128  # the first step of the map: before it every block is as low as any valley, as the formation shows


def headline(names: Sequence[str] = ("base", "no-bos")) -> Figure:
    """Return the entropy of raw states over layers and tokens, the sink's step and the best layers drawn on it."""
    from matplotlib.figure import Figure as New

    titles = {
        "base": "[BOS] before every text",
        "no-bos": "the same model without [BOS]",
        "long": "[BOS] before every text, and more of it (a wider scale of colors)",
    }
    figure = New(figsize=(10, 4.1), layout="constrained")
    places: list[Axes] = list(figure.subplots(1, len(names), sharey=True, squeeze=False)[0])
    runs = [read_run(name) for name in names]
    low = min(
        float(one.values[[step >= COLORED for step in one.steps]].min()) for one in (run.metric(RAW) for run in runs)
    )
    mesh = None
    for place, name, run in zip(places, names, runs, strict=True):
        mesh = _heat(place, run, low)
        place.set_title(titles.get(name, name), loc="left", fontsize=11, color=LIGHT["ink"])
    places[0].set_ylabel("layer", color=LIGHT["soft"], fontsize=9)
    handles = {
        label: handle for place in places for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9
    )
    if mesh is not None:
        bar = figure.colorbar(mesh, ax=places, pad=0.015, aspect=25)
        bar.set_label("prompt entropy of raw states, nats", fontsize=9, color=LIGHT["soft"])
        bar.ax.tick_params(labelsize=8, colors=LIGHT["soft"])
        bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


def _heat(axes: Axes, run: Run, low: float) -> QuadMesh:
    one = run.metric(RAW)
    seen = [place for place, step in enumerate(one.steps) if step >= COLORED]
    tokens = np.array([one.steps[place] for place in seen]) * float(TOKENS)
    middles = np.sqrt(tokens[1:] * tokens[:-1])
    edges = np.concatenate([[tokens[0] ** 2 / middles[0]], middles, [tokens[-1] ** 2 / middles[-1]]])
    layers = np.arange(len(one.layers) + 1) - 0.5
    mesh = axes.pcolormesh(edges, layers, one.values[seen].T, cmap="Blues_r", vmin=low, vmax=4.0)
    axes.set_xscale("log")
    ticks = [tick for tick in (1e7, 2e7, 5e7, 1e8, 2e8, 5e8) if tick < edges[-1]]
    axes.set_xticks(ticks, [f"{tick / 1e6:.0f}M" for tick in ticks])
    axes.minorticks_off()
    axes.tick_params(labelsize=8, colors=LIGHT["soft"], length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("tokens seen", fontsize=9, color=LIGHT["soft"])
    formed = event(run.metric("first_token_share"))
    if formed.final > 0.1:
        axes.axvline(
            formed.half, color=SERIES[1], linewidth=1.8, label="the first token's share has half of its final value"
        )
    best = _best_by_task(run)
    for number, points in enumerate(best.values()):
        shift = 1.02 ** (number - (len(best) - 1) / 2)  # so that tasks with the same best layer stand side by side
        axes.plot(
            [step * TOKENS * shift for step in points], list(points.values()), "o", markersize=5, color="white",
            markeredgecolor=SERIES[3], markeredgewidth=1.4, label=None if number else "best layer of a task", clip_on=False,
        )  # fmt: skip
    mean = run.scores()
    later = [place for place, step in enumerate(mean.steps) if step]
    axes.plot(
        [mean.steps[place] * TOKENS for place in later], [int(mean.values[place].argmax()) for place in later],
        color=SERIES[3], linewidth=1.6, label="best layer, mean of the tasks",
    )  # fmt: skip
    return mesh


def _best_by_task(run: Run) -> dict[str, dict[int, int]]:
    """Return for each task the best layer at each stage after the first step."""
    plain = run.frame.filter(~pl.col("dataset").str.contains(" "), kind="score")
    return {
        one.dataset: {step: int(np.nanargmax(row)) for step, row in zip(one.steps, one.values, strict=True) if step}
        for one in histories(plain)
    }
