"""Measure the layers of an encoder on texts, score them on labels, and choose a layer from both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders._types import Progress
from midlayer_encoders.frame import ByLayer, Curves, curves, tidy_frame, tidy_rows
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.media import medium_of
from midlayer_encoders.metrics.sample_metrics import LEAST_TOKENS
from midlayer_encoders.reading.batches import LayerSource, batches_of, count_tokens
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.scoring import all_alike
from midlayer_encoders.selection.mixture import Mixture
from midlayer_encoders.selection.ridge import equal_steps, gain_interval, resampled_means, ridge_correct
from midlayer_encoders.selection.rules import RULES, best_layer, choose, metrics_of
from midlayer_encoders.selection.selection_result import LabelEvidence, Selection, make_selection

LABELS = "your labels"
"""Name of the labels in the frame; the score is cross-validated accuracy."""

MIN_TEXTS = 16
"""Fewer texts than this are not measured."""

_ONE_PASS_METRICS = ("half_match", "prompt_entropy", "dataset_entropy")
_LABELS_TIMES_REPEATS = 300  # with few labels, the accuracy depends on the folds


@dataclass(frozen=True)
class SelectionInputs:
    """Validated inputs of a selection.

    Attributes:
        texts: all texts, ``None`` for none.
        labeled: texts with a label, at most ``max_texts``.
        classes: of the labeled texts, shape ``(N,)``; ``None`` without labels.
        max_texts: maximum number of texts to measure.
        seed: for views, folds and resamples.
        token_budget: tokens in a batch.
        progress: called after each batch.
    """

    texts: list[Any] | None
    labeled: list[Any]
    classes: Tensor | None
    max_texts: int
    seed: int
    token_budget: int
    progress: Progress | None

    @property
    def sample(self) -> list[Any]:
        """The texts to measure, at equal steps if there are more than ``max_texts``."""
        texts = self.texts or []
        return [texts[position] for position in equal_steps(len(texts), self.max_texts)]

    @property
    def repeats(self) -> int:
        """Number of random folds."""
        return max(1, min(3, _LABELS_TIMES_REPEATS // len(self.labeled)))


def metric_names(requested: Sequence[str], all_rules: bool) -> list[str]:
    """Return the metrics to measure: those of a single pass are always included, because they are free."""
    rule_metrics = [metric for rule in RULES for metric in metrics_of(rule)] if all_rules else []
    return list(dict.fromkeys([*_ONE_PASS_METRICS, *requested, *rule_metrics]))


def measure_metrics(
    source: LayerSource, inputs: SelectionInputs, requested: Sequence[str] = (), *, all_rules: bool = False
) -> tuple[pl.DataFrame, str]:
    """Return the metrics of every layer on the texts, and why they were not measured, if so."""
    if unmeasured := _too_few_texts(inputs.texts):
        return tidy_frame(()), unmeasured
    texts = inputs.sample
    names = metric_names(requested, all_rules)
    if medium_of(texts[0], source.media) == "text":
        num_long_texts = sum(count >= LEAST_TOKENS for count in count_tokens(source, texts))
        if num_long_texts < MIN_TEXTS:
            names = [name for name in names if name not in ("half_match", "prompt_entropy")]
    options: dict[str, Any] = {"seed": inputs.seed, "token_budget": inputs.token_budget, "progress": inputs.progress}
    return measure_layers(source, texts, metrics=names, **options), ""


def _too_few_texts(texts: Sequence[Any] | None) -> str:
    count = len(texts or ())
    if texts is None or count < MIN_TEXTS:
        return f"needs {MIN_TEXTS} texts or more, but got {count or 'none'}"
    distinct = len(set(texts)) if all(isinstance(text, str) for text in texts) else count
    return f"needs {MIN_TEXTS} different texts or more, but got {distinct}" if distinct < MIN_TEXTS else ""


def label_vectors(source: LayerSource, inputs: SelectionInputs, done: Callable[[int], None]) -> Tensor:
    """Return the vectors of the labeled texts at every layer, as ``encode`` returns them, shape ``(L, N, D)``."""
    prompt = source.default_prompt
    reader = layer_reader(source, prompt=prompt)
    batches = batches_of(source, inputs.labeled, token_budget=inputs.token_budget, prompt=prompt)
    return reader.vectors(inputs.labeled, batches, done=done)


def label_accuracy(vectors: Tensor, inputs: SelectionInputs) -> Tensor:
    """Return how often each layer predicts the label of each text, over several folds, shape ``(L, N)``.

    NaN if all vectors of a layer are equal but those of others are not, as for a constant last token.
    """
    assert inputs.classes is not None
    draws = [ridge_correct(vectors, inputs.classes, seed=inputs.seed + repeat) for repeat in range(inputs.repeats)]
    accuracy = torch.stack(draws).double().mean(dim=0)
    is_constant = all_alike(vectors, list(map(str, inputs.labeled)))
    return torch.where((is_constant & ~is_constant.all())[:, None], torch.nan, accuracy)


def select_from_scores(
    source: LayerSource,
    inputs: SelectionInputs,
    metrics: pl.DataFrame,
    accuracy: Tensor | None,
    *,
    rule: str = "auto",
    unmeasured: str = "",
    default: tuple[int, str] | None = None,
    mixture: Mixture | None = None,
) -> Selection:
    """Return the selection from metrics and from the accuracy on labels.

    Args:
        source: the encoder.
        inputs: texts and labels.
        metrics: tidy frame, may be empty.
        accuracy: of :func:`label_accuracy`; ``None`` without labels.
        rule: that chooses the layer.
        unmeasured: why no metric was measured.
        default: layer and reason of ``auto`` without labels; by default those of the rule.
        mixture: learned from labels, if requested.
    """
    spec = source.spec
    frame = metrics
    if accuracy is not None:
        scores = dict(enumerate(accuracy.mean(dim=1).tolist()))
        rows = tidy_rows(scores, spec, kind="score", dataset=LABELS, name="accuracy")
        frame = pl.concat([metrics, tidy_frame(rows)])
    model_curves = Curves(spec.model, spec.revision or "default", spec.num_layers, {}, {}, {})
    if not frame.is_empty():
        model_curves = curves(frame)
    auto = default
    evidence = None
    if accuracy is not None:
        default = default or choose(replace(model_curves, tasks={}, score={}), "auto")
        auto = _weigh_labels(model_curves, accuracy, *default, seed=inputs.seed)
        evidence = _label_evidence(accuracy, auto[0] if rule == "auto" else None, seed=inputs.seed)
    return make_selection(
        model_curves, frame, rule=rule, labels=evidence, unmeasured=unmeasured, auto=auto, mixture=mixture
    )


def is_significantly_better(accuracy: Tensor, layer: int, other: int, *, seed: int = 0) -> bool:
    """Return True if a layer beats another on 97.5 % of resampled texts; ``accuracy`` is ``(L, N)``.

    Example:
        >>> is_significantly_better(torch.tensor([[1.0] * 20, [0.0] * 20]), 0, 1)
        True
    """
    return gain_interval(accuracy[layer], accuracy[other], seed=seed)[0] > 0


def _weigh_labels(
    model_curves: Curves, accuracy: Tensor, default: int, default_reason: str, *, seed: int
) -> tuple[int, str]:
    """Return the choice of ``auto`` with labels: their layer if it is significantly better than the default."""
    if len(set(model_curves.score.values())) == 1:
        return default, f"{default_reason}; all layers have the same accuracy on the labels"
    layer, reason = choose(model_curves, "few-labels")
    if layer == default:
        return layer, f"few-labels: {reason}, and {default_reason}"
    if is_significantly_better(accuracy, layer, default, seed=seed):
        return layer, f"few-labels: {reason}, significantly more than at layer {default}, the choice without labels"
    count = accuracy.shape[1]
    return default, f"{default_reason}; few-labels would choose layer {layer}, but {count} labels are not enough"


def _by_layer(values: Tensor) -> ByLayer:
    return {layer: value for layer, value in enumerate(values.tolist()) if value == value}


def _label_evidence(accuracy: Tensor, layer: int | None, *, seed: int) -> LabelEvidence:
    """Return the evidence for a layer against the last; by default for the best layer on the labels."""
    chosen = best_layer(_by_layer(accuracy.mean(dim=1))) if layer is None else layer
    resampled_best = [best_layer(_by_layer(means)) for means in resampled_means(accuracy, seed=seed)]
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    first, last = torch.quantile(torch.tensor(resampled_best).double(), bounds, interpolation="nearest").tolist()
    low, high = gain_interval(accuracy[chosen], accuracy[-1], seed=seed)
    gain = float(accuracy[chosen].mean() - accuracy[-1].mean())
    return LabelEvidence(accuracy.shape[1], (int(first), int(last)), 100 * gain, 100 * low, 100 * high)
