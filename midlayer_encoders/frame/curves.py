"""Curves over layers from a tidy frame: of each dataset, their mean, and all those of one model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import block_counts, check_frame, check_one_model

ByLayer: TypeAlias = Mapping[int, float]
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
    metrics: Mapping[str, ByLayer]
    tasks: Mapping[str, ByLayer]
    score: ByLayer


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
    measured = frame.filter(pl.col("kind") == "metric", pl.col("value").is_finite())
    metrics = {
        str(name): mean_curve(list(curves_by_dataset(rows).values()))
        for (name,), rows in measured.group_by("name", maintain_order=True)
    }
    tasks = curves_by_dataset(frame.filter(pl.col("kind") == "score"))
    return Curves(model, revision, num_layers, metrics, tasks, mean_curve(list(tasks.values())))


def curves_by_dataset(rows: pl.DataFrame) -> dict[str, ByLayer]:
    """Return the finite values of each dataset by layer, in the order of the rows; a dataset without any has none.

    Args:
        rows: of a tidy frame: one metric of one model, or its scores, one for each task.
    """
    found: dict[str, ByLayer] = {}
    for (dataset,), part in rows.group_by("dataset", maintain_order=True):
        names = part["name"].unique(maintain_order=True).to_list()
        if len(names) > 1:
            raise OptionError(
                f"`frame` must have one score for each task, its main one, but got {', '.join(names)} for "
                f"{dataset!r}; filter the others out."
            )
        finite = part.filter(pl.col("value").is_finite()).sort("layer")
        if not finite.is_empty():
            found[str(dataset)] = dict(finite.select("layer", "value").iter_rows())
    return found


def mean_curve(curves: Sequence[ByLayer]) -> ByLayer:
    """Return the mean of curves over the layers that all of them have; empty where there are none.

    Example:
        >>> mean_curve([{0: 0.5, 1: 0.25, 2: 1.0}, {0: 0.25, 2: 0.5}])
        {0: 0.375, 2: 0.75}
    """
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return {layer: math.fsum(curve[layer] for curve in curves) / len(curves) for layer in shared}


def _num_layers(frame: pl.DataFrame, model: str) -> int:
    found = block_counts(frame)
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
