"""Measure models on the same texts, and compare them: differences with intervals, and CKA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, sqrt
from pathlib import Path
from statistics import NormalDist

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders._types import EncoderSpec, Layer, Progress, Stage
from midlayer_encoders.comparing.text_metrics import TextMeasurements, measure_texts
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.measuring import agreed
from midlayer_encoders.metrics.cka import cka_matrix
from midlayer_encoders.report.comparison_page import DIFFERENCES, SIMILARITY
from midlayer_encoders.validation import check_count, check_number


@dataclass(frozen=True, kw_only=True)
class IntervalSettings:
    """Settings of the intervals of :func:`~midlayer_encoders.compare`.

    Attributes:
        resamples: number of random halves of the texts, at least 2.
        confidence: of the intervals, in ``(0, 1)``.
    """

    resamples: int = 50
    confidence: float = 0.95

    def __post_init__(self) -> None:
        object.__setattr__(self, "resamples", check_count("resamples", self.resamples, minimum=2))
        confidence = check_number("confidence", self.confidence, maximum=1.0)
        if not 0 < confidence < 1:
            raise OptionError(f"`confidence` must be in (0, 1), as 0.95, but got {self.confidence}.")
        object.__setattr__(self, "confidence", confidence)


def random_halves(count: int, resamples: int, *, seed: int = 0) -> Tensor:
    """Return positions of random halves of ``count`` texts, without replacement, shape ``(R, count // 2)``.

    A bootstrap with replacement would repeat texts, and a repeated text is its own nearest neighbor and a false
    negative: it moves InfoNCE by 12 and DiME by 29 of their standard errors, effective rank by 3
    (benchmarks/results/halves.md).

    Example:
        >>> random_halves(6, 2).shape, len(set(random_halves(6, 2)[0].tolist()))
        (torch.Size([2, 3]), 3)
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=generator)[: count // 2] for _ in range(resamples)])


def half_width(values: Tensor, count: int, *, confidence: float = 0.95) -> Tensor:
    r"""Return half the width of the interval of a statistic, from its values on random halves of the texts.

    .. math::
        z \sqrt{\frac{m}{n - m}} \operatorname{sd}_r \theta_r, \qquad m = \lfloor n / 2 \rfloor

    This is the standard error by half-sampling (McCarthy, 1969; Shao & Wu, 1989): a half differs from the whole as much
    as the whole differs from the population. For a mean it equals the usual standard error.

    Args:
        values: on R halves, shape ``(R, *)``.
        count: number n of texts.
        confidence: of the interval, in ``(0, 1)``; z is its normal quantile.

    Returns:
        Shape ``(*)``.

    Example:
        >>> half_width(torch.tensor([1.0, 2.0, 3.0]), 10)
        tensor(1.9600)
    """
    half = count // 2
    scale = NormalDist().inv_cdf((1 + confidence) / 2) * sqrt(half / (count - half))
    return values.std(dim=0) * scale


@dataclass(frozen=True)
class ComparisonInputs:
    """The inputs and options with which every model is measured."""

    texts: Sequence[str]
    views: Sequence[Sequence[str]]
    metrics: tuple[str, ...]
    layers: Sequence[Layer] | str
    options: EncoderOptions
    halves: Tensor
    progress: Progress | None


@dataclass(frozen=True)
class MeasuredModel:
    """A model's metrics over all texts (``values``) and over their halves (``half_values``)."""

    label: str
    spec: EncoderSpec
    vocabulary_hash: int
    measurements: TextMeasurements
    values: dict[str, Tensor]
    half_values: dict[str, Tensor]


def measure_model(encoder: LayerEncoder, inputs: ComparisonInputs, previous: Sequence[MeasuredModel]) -> MeasuredModel:
    """Return the metrics of a model over all texts and over their halves, and its vectors."""
    spec = encoder.spec
    agreed("pooling", inputs.options.pooling, encoder.pooling)
    for model in previous:
        if replace(spec, model="", revision=None) == replace(model.spec, model="", revision=None):
            raise OptionError(
                f"`tuned` must differ from `base` and from each other, but {spec.model} has the same weights and "
                f"settings as {model.label}."
            )
    label = _unique_label(encoder, [model.label for model in previous])
    stage = Stage(inputs.progress, f"texts of {label}", len(inputs.texts) * (1 + len(inputs.views)))
    measurements = measure_texts(
        encoder,
        inputs.texts,
        views=inputs.views,
        metrics=inputs.metrics,
        layers=inputs.layers,
        norm=inputs.options.norm,
        done=stage.step,
    )
    values = {name: measurements.value(name) for name in inputs.metrics}
    stage = Stage(inputs.progress, f"halves of {label}", len(inputs.halves) * len(inputs.metrics))
    half_values = {name: _values_on_halves(measurements, name, inputs.halves, stage) for name in inputs.metrics}
    # A slice without clone would keep the memory of all views.
    measurements = replace(measurements, text_values={}, views=measurements.views[:, :0].clone())
    vocabulary_hash = hash(frozenset(encoder.tokenizer.get_vocab().items()))
    return MeasuredModel(label, spec, vocabulary_hash, measurements, values, half_values)


def _values_on_halves(measurements: TextMeasurements, metric: str, halves: Tensor, stage: Stage) -> Tensor:
    """Return a metric of every layer on every half, shape ``(R, L)``."""
    values = []
    for half in halves:
        values.append(measurements.value(metric, half))
        stage.step()
    return torch.stack(values)


def _unique_label(encoder: LayerEncoder, labels: Sequence[str]) -> str:
    """Return a label that is not in ``labels``: the model's name, with its revision or parent folder if needed."""
    spec = encoder.spec
    name = f"{spec.model}@{spec.revision}" if spec.revision else spec.model
    if name in labels and Path(encoder.source).expanduser().is_dir():
        name = f"local/{Path(encoder.source).expanduser().resolve().parent.name}/{name.removeprefix('local/')}"
    number = 2
    label = name
    while label in labels:
        label = f"{name} ({number})"
        number += 1
    return label


def metric_rows(model: MeasuredModel, dataset: str) -> pl.DataFrame:
    """Return the tidy frame of a model's metrics."""
    spec = model.spec
    name = spec.model if spec.revision else model.label  # the frame has a column for the revision
    subject = NamedSubject(name, spec.revision, model.measurements.num_layers)
    rows = []
    for metric, values in model.values.items():
        by_layer = dict(zip(model.measurements.layers, values.tolist(), strict=True))
        rows += tidy_rows(by_layer, subject, kind="metric", dataset=dataset, name=metric)
    return tidy_frame(rows)


def _paired_layers(base: TextMeasurements, other: TextMeasurements) -> list[tuple[int, int]]:
    """Return the measured layers of two models at the relative depths that both have."""
    steps = gcd(base.num_layers, other.num_layers)
    pairs = [(step * base.num_layers // steps, step * other.num_layers // steps) for step in range(steps + 1)]
    return [(base_layer, layer) for base_layer, layer in pairs if base_layer in base.layers and layer in other.layers]


def difference_frame(base: MeasuredModel, other: MeasuredModel, confidence: float, dataset: str) -> pl.DataFrame:
    """Return the other model's metrics minus the base's at equal relative depths, each with its interval."""
    count = base.measurements.vectors.shape[1]
    rows = []
    for name, base_values in base.values.items():
        for base_layer, layer in _paired_layers(base.measurements, other.measurements):
            base_row = base.measurements.layers.index(base_layer)
            row = other.measurements.layers.index(layer)
            change = float(other.values[name][row] - base_values[base_row])
            half_changes = other.half_values[name][:, row] - base.half_values[name][:, base_row]
            margin = float(half_width(half_changes, count, confidence=confidence))
            depth = base_layer / base.measurements.num_layers
            values = (change, change - margin, change + margin)
            rows.append((base.label, other.label, base_layer, layer, depth, dataset, name, *values))
    return pl.DataFrame(rows, schema=DIFFERENCES, orient="row")


def similarity_frame(base: MeasuredModel, other: MeasuredModel) -> pl.DataFrame:
    """Return the unbiased linear CKA of every layer of the base with every layer of another model."""
    similarity = cka_matrix(base.measurements.vectors, other.measurements.vectors, unbiased=True).tolist()
    rows = [
        (base.label, other.label, base_layer, layer, value)
        for base_layer, values in zip(base.measurements.layers, similarity, strict=True)
        for layer, value in zip(other.measurements.layers, values, strict=True)
    ]
    return pl.DataFrame(rows, schema=SIMILARITY, orient="row")


def pair_notes(base: MeasuredModel, other: MeasuredModel) -> list[str]:
    """Return caveats about comparing two models."""
    base_depth = base.measurements.num_layers
    depth = other.measurements.num_layers
    notes = []
    if base_depth != depth:
        shared = len(_paired_layers(base.measurements, other.measurements))
        notes.append(
            f"{other.label} has {depth} blocks and {base.label} {base_depth}: differences are taken at the {shared} "
            "depths that both have, curves are over relative depth."
        )
    if base.vocabulary_hash != other.vocabulary_hash:
        notes.append(
            f"{other.label} and {base.label} have different tokenizers, so token metrics differ for that reason too."
        )
    return notes
