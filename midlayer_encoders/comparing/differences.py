"""Models read one after the other, and what sets them apart: differences with intervals, CKA, and their notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders._types import EncoderSpec, Layer, Norm, Pooling, Progress, Stage
from midlayer_encoders.comparing.halves import half_width
from midlayer_encoders.comparing.text_metrics import Kept, keep
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.measuring import agreed
from midlayer_encoders.metrics.cka import cka_matrix
from midlayer_encoders.report.comparison_page import DIFFERENCES, SIMILARITY

__all__ = [
    "ReadModel",
    "Reading",
    "difference_frame",
    "metric_rows",
    "pair_notes",
    "read_model",
    "similarity_frame",
]


@dataclass(frozen=True)
class Reading:
    """How every model is read."""

    texts: Sequence[str]
    views: Sequence[Sequence[str]]
    metrics: tuple[str, ...]
    layers: Sequence[Layer] | str
    norm: Norm
    pooling: Pooling | None
    halves: Tensor
    progress: Progress | None


@dataclass(frozen=True)
class ReadModel:
    """What is left of a model once its views are let go."""

    label: str
    spec: EncoderSpec
    vocabulary: int
    kept: Kept
    values: dict[str, Tensor]
    spreads: dict[str, Tensor]


def read_model(encoder: LayerEncoder, reading: Reading, before: Sequence[ReadModel]) -> ReadModel:
    """Return a model's metrics over all texts and over their halves, and its vectors."""
    spec = encoder.spec
    agreed("pooling", reading.pooling, encoder.pooling)
    for other in before:
        if replace(spec, model="", revision=None) == replace(other.spec, model="", revision=None):
            raise OptionError(
                f"`tuned` must differ from `base` and from each other, but {spec.model} has the very weights and "
                f"settings of {other.label}."
            )
    label = _label(encoder, [other.label for other in before])
    kept = keep(
        encoder, reading.texts, views=reading.views, metrics=reading.metrics, layers=reading.layers,
        norm=reading.norm,
        done=Stage(reading.progress, f"texts of {label}", len(reading.texts) * (1 + len(reading.views))).step,
    )  # fmt: skip
    values = {name: kept.value(name) for name in reading.metrics}
    stage = Stage(reading.progress, f"halves of {label}", len(reading.halves) * len(reading.metrics))
    spreads = {name: _on_halves(kept, name, reading.halves, stage) for name in reading.metrics}
    slim = replace(kept, numbers={}, views=kept.views[:, :0].clone())  # a view of them would keep them all
    return ReadModel(label, spec, _vocabulary(encoder), slim, values, spreads)


def _on_halves(kept: Kept, metric: str, halves: Tensor, stage: Stage) -> Tensor:
    """Return a metric of every layer on every half, shape ``(R, L)``."""
    found = []
    for half in halves:
        found.append(kept.value(metric, half))
        stage.step()
    return torch.stack(found)


def _vocabulary(encoder: LayerEncoder) -> int:
    """Return what differs where two tokenizers do."""
    return hash(frozenset(encoder.tokenizer.get_vocab().items()))


def _label(encoder: LayerEncoder, taken: Sequence[str]) -> str:
    """Return what a model is called: its name, with its revision, or with its folder's folder, where needed."""
    spec = encoder.spec
    name = f"{spec.model}@{spec.revision}" if spec.revision else spec.model
    if name in taken and Path(encoder.source).expanduser().is_dir():
        name = f"local/{Path(encoder.source).expanduser().resolve().parent.name}/{name.removeprefix('local/')}"
    number = 2
    unique = name
    while unique in taken:
        unique, number = f"{name} ({number})", number + 1
    return unique


def metric_rows(read: ReadModel, dataset: str) -> pl.DataFrame:
    """Return the tidy frame of a model's metrics."""
    spec = read.spec
    model = spec.model if spec.revision else read.label  # the revision has a column of its own
    of = NamedSubject(model, spec.revision, read.kept.num_layers)
    return tidy_frame(
        row
        for name, values in read.values.items()
        for row in tidy_rows(
            dict(zip(read.kept.layers, values.tolist(), strict=True)), of, kind="metric", dataset=dataset, name=name
        )
    )


def _pairs(first: Kept, second: Kept) -> list[tuple[int, int]]:
    """Return the layers of two models that are equally deep: all of them where the models are."""
    steps = gcd(first.num_layers, second.num_layers)
    every = [(k * first.num_layers // steps, k * second.num_layers // steps) for k in range(steps + 1)]
    return [(mine, theirs) for mine, theirs in every if mine in first.layers and theirs in second.layers]


def difference_frame(
    base: ReadModel, other: ReadModel, reading: Reading, confidence: float, dataset: str
) -> pl.DataFrame:
    """Return a model minus the base at equally deep layers, each with its interval."""
    rows = []
    for name in reading.metrics:
        for mine, theirs in _pairs(base.kept, other.kept):
            at, to = base.kept.layers.index(mine), other.kept.layers.index(theirs)
            change = float(other.values[name][to] - base.values[name][at])
            spread = other.spreads[name][:, to] - base.spreads[name][:, at]
            wide = float(half_width(spread, len(reading.texts), confidence=confidence))
            depth = mine / base.kept.num_layers
            rows.append(
                (base.label, other.label, mine, theirs, depth, dataset, name, change, change - wide, change + wide)
            )
    return pl.DataFrame(rows, schema=DIFFERENCES, orient="row")


def similarity_frame(base: ReadModel, other: ReadModel) -> pl.DataFrame:
    """Return the unbiased linear CKA of every layer of the base with every layer of a model."""
    alike = cka_matrix(base.kept.vectors, other.kept.vectors, unbiased=True).tolist()
    rows = [
        (base.label, other.label, mine, theirs, value)
        for mine, row in zip(base.kept.layers, alike, strict=True)
        for theirs, value in zip(other.kept.layers, row, strict=True)
    ]
    return pl.DataFrame(rows, schema=SIMILARITY, orient="row")


def pair_notes(base: ReadModel, other: ReadModel) -> list[str]:
    """Return what a reader should know of two models that are compared."""
    notes = []
    if base.kept.num_layers != other.kept.num_layers:
        shared = len(_pairs(base.kept, other.kept))
        notes.append(
            f"{other.label} has {other.kept.num_layers} blocks and {base.label} {base.kept.num_layers}: differences "
            f"are taken at the {shared} depths that both have, curves are over relative depth."
        )
    if base.vocabulary != other.vocabulary:
        notes.append(
            f"{other.label} and {base.label} split texts into different tokens, so metrics of tokens differ for that "
            "reason too."
        )
    return notes
