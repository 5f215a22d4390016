"""Curves by layer from a tidy frame: per dataset, their mean, and all curves of one model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import block_counts, check_frame, check_one_model

#: Value by layer, in ascending order.
ByLayer: TypeAlias = Mapping[int, float]

_MIN_BLOCKS = 3


@dataclass(frozen=True)
class Curves:
    """The curves of one model at one revision.

    Attributes:
        model: name of the model.
        revision: of the model.
        num_layers: number of blocks.
        metrics: mean over all datasets, by metric.
        tasks: scores by task.
        score: mean score of the layers that were scored on every task; empty without scores.
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
        OptionError: if the frame holds several models, one model at several depths, or fewer than three blocks.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 3, "metric", "texts", "dime", v) for k, v in enumerate([0.3, 0.2, 0.1, 0.4])]
        >>> dime = curves(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> dime.num_layers, dime.metrics["dime"][2]
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
    """Return the finite values of each dataset by layer; a dataset without finite values is left out.

    Args:
        rows: of a tidy frame: one metric of one model, or one score of each of its tasks.
    """
    by_dataset: dict[str, ByLayer] = {}
    for (dataset,), part in rows.group_by("dataset", maintain_order=True):
        names = part["name"].unique(maintain_order=True).to_list()
        if len(names) > 1:
            raise OptionError(
                f"`frame` must have one score for each task, its main one, but got {', '.join(names)} for "
                f"{dataset!r}; filter the others out."
            )
        finite = part.filter(pl.col("value").is_finite()).sort("layer")
        if not finite.is_empty():
            by_dataset[str(dataset)] = dict(finite.select("layer", "value").iter_rows())
    return by_dataset


def mean_curve(curves: Sequence[ByLayer]) -> ByLayer:
    """Return the mean of curves at the layers that all of them have.

    Example:
        >>> mean_curve([{0: 0.5, 1: 0.25, 2: 1.0}, {0: 0.25, 2: 0.5}])
        {0: 0.375, 2: 0.75}
    """
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return {layer: math.fsum(curve[layer] for curve in curves) / len(curves) for layer in shared}


def _num_layers(frame: pl.DataFrame, model: str) -> int:
    counts = block_counts(frame)
    if len(counts) > 1:
        raise OptionError(
            f"`frame` must hold one model at one depth, but {model} has {' and '.join(map(str, counts))} blocks in it: "
            "it mixes different encoders. Filter it first."
        )
    num_layers = max(counts, default=0)
    check_blocks(num_layers, model)
    return num_layers


def check_blocks(num_layers: int, model: str) -> None:
    """Raise an :class:`OptionError` if a model has too few blocks to select a layer."""
    if num_layers < _MIN_BLOCKS:
        raise OptionError(
            f"`model` must have {_MIN_BLOCKS} blocks or more to select a layer, but {model} has "
            f"{num_layers}: compare its layers on your task instead."
        )
