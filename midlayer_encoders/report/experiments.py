"""What the paper's experiments draw: panels of curves, which matplotlib and the page both render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import check_frame, number_of_layers
from midlayer_encoders.frame.steps import histories, step_word

if TYPE_CHECKING:
    pass

__all__ = [
    "Panel",
    "Trace",
    "along_panels",
    "metric_depth_panels",
    "order_panels",
    "prompt_panels",
    "score_panels",
    "shared_labels",
    "step_panels",
    "subblock_panels",
]

_DEPTH = "depth, % of the layers"


@dataclass(frozen=True)
class Trace:
    """One curve of a panel.

    Attributes:
        label: in the legend.
        x: in order.
        y: of each x.
        band: lower and upper end at each x, empty for none.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    band: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Panel:
    """Curves over one axis.

    Attributes:
        title: above it.
        x_label: below it.
        traces: the curves.
        ordered: whether the curves are steps of one amount, and so take colours in their order.
    """

    title: str
    x_label: str
    traces: tuple[Trace, ...]
    ordered: bool = False

    @property
    def end(self) -> float:
        """The right end of the axis."""
        return max(max(trace.x) for trace in self.traces)


def shared_labels(panels: Sequence[Panel]) -> list[str]:
    """Return the labels of one key for all panels, or none where each needs its own: amounts that differ."""
    labels = list(dict.fromkeys(trace.label for panel in panels for trace in panel.traces))
    alike = all(len(panel.traces) == len(labels) for panel in panels)
    return labels if alike or not any(panel.ordered for panel in panels) else []


# --- what each experiment draws ------------------------------------------------------------------------------------


def score_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return the mean score over tasks by depth, in points, a curve for each model (Figure 1).

    Only layers that were scored on every task of the model count.
    """
    scores = check_frame(frame).filter(pl.col("kind") == "score")
    if scores.is_empty():
        raise OptionError("`frame` must have rows of kind 'score' to draw scores by depth, but got none.")
    traces = []
    for (model, revision), part in scores.group_by("model", "revision", maintain_order=True):
        every = part["dataset"].n_unique()
        mean = part.group_by("layer", "depth").agg(pl.col("value").mean(), pl.len()).filter(pl.col("len") == every)
        mean = mean.sort("layer")
        label = f"{_model_label(scores, model, revision)} ({every} tasks)"
        traces.append(Trace(label, tuple(100 * mean["depth"]), tuple(100 * mean["value"])))
    return [Panel("mean score, points", _DEPTH, tuple(traces))]


def metric_depth_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return a panel for each metric, a curve for each model and set of texts (Figures 2, 10, 12 and 13)."""
    frame = check_frame(frame).filter(pl.col("kind") == "metric")
    depths = {number_of_layers(part) for _, part in frame.group_by("model", "revision")} - {0}
    relative = len(depths) > 1
    x = 100 * pl.col("depth") if relative else pl.col("layer")
    traces: dict[str, list[Trace]] = {name: [] for name in frame["name"].unique(maintain_order=True)}
    for (name, model, revision, dataset), part in frame.group_by(
        "name", "model", "revision", "dataset", maintain_order=True
    ):
        label = _model_label(frame, model, revision)
        mine = frame.filter(pl.col("model") == model, pl.col("name") == name)
        label += f", {dataset}" if mine["dataset"].n_unique() > 1 else ""
        rows = part.sort("layer").select(x.alias("x"), "value")
        traces[str(name)].append(Trace(label, tuple(rows["x"]), tuple(rows["value"])))
    return [Panel(name, _DEPTH if relative else "layer", tuple(many)) for name, many in traces.items()]


def along_panels(frame: pl.DataFrame, *, depths: Sequence[float] = (0.25, 0.5, 0.75, 1.0)) -> list[Panel]:
    """Return prompt entropy along the text at some depths, a curve for each model, with its deviation (Figure 5).

    Positions that fewer than half of the texts reach are left out: which texts are long is not the model's doing.
    """
    panels: dict[float, list[Trace]] = {depth: [] for depth in depths}
    shown: dict[float, set[int]] = {depth: set() for depth in depths}
    for (model, revision), part in frame.group_by("model", "revision", maintain_order=True):
        kept = part.filter(pl.col("texts") >= part["texts"].max() / 2)  # type: ignore[operator]
        layers = kept["layer"].unique().sort().to_list()
        for depth in depths:
            layer = min(layers, key=lambda one: (abs(one - depth * max(layers)), one))
            rows = kept.filter(pl.col("layer") == layer).sort("position")
            around = zip(rows["value"] - rows["deviation"], rows["value"] + rows["deviation"], strict=True)
            shown[depth].add(layer)
            label = _model_label(frame, model, revision)
            panels[depth].append(Trace(label, tuple(rows["position"]), tuple(rows["value"]), tuple(around)))
    titles = {
        depth: f"layer{'s'[: len(layers) - 1]} {' and '.join(map(str, sorted(layers)))}, {100 * depth:g} % of the depth"
        for depth, layers in shown.items()
    }
    return [Panel(titles[depth], "tokens so far", tuple(many)) for depth, many in panels.items()]


_CONDITIONS = {
    "repetition": "repetition: tokens become one token of the text",
    "resampling": "resampling: tokens become others of the text",
    "randomness": "randomness: tokens become any of the vocabulary",
    "length": "length: the first so many tokens, nats",
}


def prompt_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return prompt entropy by layer, a panel for each condition and a curve for each amount (Figure 6)."""
    several = frame["model"].n_unique() > 1
    panels = []
    for (model, condition), part in frame.group_by("model", "condition", maintain_order=True):
        word = "{:g} tokens" if condition == "length" else "p = {:g}"
        traces = tuple(
            Trace(word.format(amount), tuple(rows["layer"]), tuple(rows["value"]))
            for (amount,), rows in part.sort("amount", "layer").group_by("amount", maintain_order=True)
        )
        title = _CONDITIONS.get(str(condition), str(condition)) + (f" ({model})" if several else "")
        panels.append(Panel(title, "layer", traces, ordered=True))
    return panels


def order_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return the entropy of power-law spectra, and the smaller half's share of it, by exponent (Figure 7)."""
    titles = {"matrix_entropy": "entropy / log n", "tail_share": "share of the smaller half of the eigenvalues"}
    return [
        Panel(
            titles[str(name)],
            "exponent β of the spectrum",
            tuple(
                Trace(f"α = {alpha:g}", tuple(rows["beta"]), tuple(rows["value"]))
                for (alpha,), rows in part.sort("alpha", "beta").group_by("alpha", maintain_order=True)
            ),
            ordered=True,
        )
        for (name,), part in frame.group_by("name", maintain_order=True)
    ]


def subblock_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return each token metric by layer, a curve for each point inside the blocks (Figure 15).

    ``residual_in`` is not drawn: it is ``residual_out`` of the layer before.
    """
    several = frame["model"].n_unique() > 1
    return [
        Panel(
            str(name) + (f" ({model})" if several else ""),
            "layer",
            tuple(
                Trace(str(site).replace("_", " "), tuple(rows["layer"]), tuple(rows["value"]))
                for (site,), rows in part.sort("layer").group_by("site", maintain_order=True)
                if site != "residual_in"
            ),
        )
        for (model, name), part in frame.group_by("model", "name", maintain_order=True)
    ]


def step_panels(frame: pl.DataFrame) -> list[Panel]:
    """Return each metric by layer, a curve for each step of the training (Figures 4 and 11)."""
    return [
        Panel(
            one.title,
            "layer",
            tuple(
                Trace(f"step {step_word(step)}", one.layers, tuple(values.tolist()))
                for step, values in zip(one.steps, one.values, strict=True)
            ),
            ordered=True,
        )
        for one in histories(frame)
    ]


def _model_label(frame: pl.DataFrame, model: object, revision: object) -> str:
    several = frame.filter(pl.col("model") == model)["revision"].n_unique() > 1
    return f"{model} {revision}" if several else str(model)
