"""What the rules read: the curves of one model over its layers, from a tidy frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import check_frame, check_one_model

__all__ = ["Curve", "Curves", "check_blocks", "curves"]

Curve = Mapping[int, float]
"""Value by layer, in the order of the layers."""

_LEAST_BLOCKS = 3


@dataclass(frozen=True)
class Curves:
    """The curves of one model at one revision.

    Attributes:
        model: its name.
        revision: of the model.
        num_layers: its number of blocks.
        metrics: by name, the mean over all texts that it was measured on.
        tasks: score of each task by its name.
        score: mean score over the tasks, of the layers that were scored on every one; empty without scores.
    """

    model: str
    revision: str
    num_layers: int
    metrics: Mapping[str, Curve]
    tasks: Mapping[str, Curve]
    score: Curve


def curves(frame: pl.DataFrame) -> Curves:
    """Return the curves of a frame that holds one model at one revision.

    Raises:
        OptionError: for a frame of several models, of one model cut at different depths, or of fewer than three blocks.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 3, "metric", "texts", "dime", v) for k, v in enumerate([0.3, 0.2, 0.1, 0.4])]
        >>> found = curves(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> found.num_layers, found.metrics["dime"][2]
        (3, 0.1)
    """
    frame = check_frame(frame)
    model, revision = check_one_model(frame)
    num_layers = _num_layers(frame, model)
    finite = frame.filter(pl.col("value").is_finite())
    measured = finite.filter(kind="metric")
    metrics = {name: _mean(list(_by(measured.filter(name=name)).values())) for name in _names(measured, "name")}
    tasks = _by(finite.filter(kind="score"))
    score = _mean(list(tasks.values())) if tasks else {}
    return Curves(model, revision, num_layers, metrics, tasks, score)


def _num_layers(frame: pl.DataFrame, model: str) -> int:
    deep = frame.filter(pl.col("depth") > 0).select("layer", "depth").unique()
    found: list[int] = sorted({round(layer / depth) for layer, depth in deep.iter_rows()})
    if len(found) > 1:
        raise OptionError(
            f"`frame` must hold one model at one depth, but {model} has {' and '.join(map(str, found))} blocks in it: "
            "frames of different encoders are mixed. Filter it first."
        )
    if not found:
        raise OptionError(f"`frame` must have layers above 0 to choose between, but {model} has layer 0 alone.")
    check_blocks(found[0], model)
    return found[0]


def check_blocks(num_layers: int, model: str) -> None:
    """Raise an :class:`OptionError` for a model with too few blocks to choose between."""
    if num_layers < _LEAST_BLOCKS:
        raise OptionError(
            f"`model` must have {_LEAST_BLOCKS} blocks or more to choose between its layers, but {model} has "
            f"{num_layers}: compare its layers on your task instead."
        )


def _names(rows: pl.DataFrame, column: str) -> list[str]:
    return rows[column].unique(maintain_order=True).to_list()


def _by(rows: pl.DataFrame) -> dict[str, Curve]:
    """Return a curve for each dataset."""
    found: dict[str, dict[int, float]] = {}
    for dataset, layer, value in rows.sort("layer").select("dataset", "layer", "value").iter_rows():
        found.setdefault(dataset, {})[layer] = value
    return dict(found)


def _mean(every: list[Curve]) -> Curve:
    """Return the mean of curves over the layers that all of them have."""
    shared = set(every[0]).intersection(*every[1:])
    return {layer: math.fsum(curve[layer] for curve in every) / len(every) for layer in every[0] if layer in shared}
