"""The layers of one encoder, measured on texts and scored on labels, and what ``auto`` makes of both."""

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
from midlayer_encoders.metrics.half_match import LEAST_TOKENS
from midlayer_encoders.reading.batches import batches_of, count_tokens
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.scoring import all_alike
from midlayer_encoders.selection.mixture import Mixture
from midlayer_encoders.selection.ridge import equal_steps, resampled_means, ridge_correct
from midlayer_encoders.selection.rules import RULES, best_layer, choose, metrics_of
from midlayer_encoders.selection.selection_result import LabelEvidence, Selection, answer

__all__ = [
    "LABELS",
    "LEAST_TEXTS",
    "Given",
    "answered",
    "how_often_right",
    "label_vectors",
    "measured",
    "metric_names",
    "surely_better",
]

LABELS = "your labels"
"""What a frame calls the scores on labels: accuracy, cross-validated."""

LEAST_TEXTS = 16
"""Fewer texts than this say nothing about a layer."""

_ONE_PASS = ("half_match", "prompt_entropy", "dataset_entropy")
_REPEATS = 300  # labels times repeats of the folds: few labels depend on how they are dealt


@dataclass(frozen=True)
class Given:
    """What a selection is made from, checked.

    Attributes:
        texts: all that were given, ``None`` for none.
        labeled: those with a label, at most ``most``.
        classes: of them, shape ``(N,)``; ``None`` without labels.
        most: texts that are looked at.
        seed: of views, folds and resamples.
        token_budget: tokens in a batch.
        progress: called after each batch.
    """

    texts: list[Any] | None
    labeled: list[Any]
    classes: Tensor | None
    most: int
    seed: int
    token_budget: int
    progress: Progress | None

    @property
    def some(self) -> list[Any]:
        """The texts that are looked at, at equal steps where there are more."""
        texts = self.texts or []
        return [texts[place] for place in equal_steps(len(texts), self.most)]

    @property
    def repeats(self) -> int:
        """How often folds are dealt."""
        return max(1, min(3, _REPEATS // len(self.labeled)))


def metric_names(wanted: Sequence[str], all_rules: bool) -> list[str]:
    """Return the metrics to measure: those of one pass always, since they cost no more."""
    every = [metric for rule in RULES for metric in metrics_of(rule)] if all_rules else []
    return list(dict.fromkeys([*_ONE_PASS, *wanted, *every]))


def measured(
    source: LayerSource, given: Given, wanted: Sequence[str] = (), *, all_rules: bool = False
) -> tuple[pl.DataFrame, str]:
    """Return the metrics of every layer on the texts, and why there are none, where there are none."""
    if lacking := _too_few(given.texts):
        return tidy_frame(()), lacking
    names = _measurable(source, given.some, metric_names(wanted, all_rules))
    if not names:
        return tidy_frame(()), ""
    options: dict[str, Any] = {"seed": given.seed, "token_budget": given.token_budget, "progress": given.progress}
    return measure_layers(source, given.some, metrics=names, **options), ""


def _measurable(source: LayerSource, texts: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Return the metrics that can be measured on these texts, without those that want longer ones."""
    of_text = medium_of(texts[0], source.media) == "text"
    counts = count_tokens(source, texts) if of_text else [LEAST_TOKENS] * len(texts)
    long_enough = sum(count >= LEAST_TOKENS for count in counts)
    short = ("half_match", "prompt_entropy") if long_enough < LEAST_TEXTS else ()
    return [name for name in names if name not in short]


def _too_few(texts: Sequence[Any] | None) -> str:
    count = 0 if texts is None else len(texts)
    if count < LEAST_TEXTS:
        return f"needs {LEAST_TEXTS} texts or more, but got {count or 'none'}"
    different = len(set(texts)) if texts is not None and all(isinstance(text, str) for text in texts) else count
    return f"needs {LEAST_TEXTS} different texts or more, but got {different}" if different < LEAST_TEXTS else ""


def label_vectors(source: LayerSource, given: Given, done: Callable[[int], None]) -> Tensor:
    """Return the vectors of the labeled texts at every layer, as ``encode`` gives them, shape ``(L, N, D)``."""
    prompt = source.default_prompt
    reader = layer_reader(source, prompt=prompt)
    batches = batches_of(source, given.labeled, token_budget=given.token_budget, prompt=prompt)
    return reader.vectors(given.labeled, batches, done=done)


def how_often_right(vectors: Tensor, given: Given) -> Tensor:
    """Return how often each layer labels each text rightly, over a few ways to deal the folds, shape ``(L, N)``.

    NaN where all vectors of a layer are alike, as of a last token that is always the same, but those of others are not.
    """
    assert given.classes is not None
    draws = [ridge_correct(vectors, given.classes, seed=given.seed + repeat) for repeat in range(given.repeats)]
    right = torch.stack(draws).double().mean(dim=0)
    alike = all_alike(vectors, list(map(str, given.labeled)))
    return torch.where((alike & ~alike.all())[:, None], torch.nan, right)


def answered(
    source: LayerSource,
    given: Given,
    metrics: pl.DataFrame,
    right: Tensor | None,
    *,
    rule: str = "auto",
    lacking: str = "",
    without: tuple[int, str] | None = None,
    mixture: Mixture | None = None,
) -> Selection:
    """Return the selection from what was measured, and from how often each layer was right.

    Args:
        source: whose layers.
        given: texts and labels.
        metrics: tidy frame, may be empty.
        right: of :func:`how_often_right`; ``None`` without labels.
        rule: whose layer is taken.
        lacking: why no metric was measured, where none was.
        without: what ``auto`` chooses without labels and why; by default what its own rule says.
        mixture: what was learned from labels, where it was asked for.
    """
    scores = [] if right is None else [_score_rows(source, right)]
    frame, spec = pl.concat([metrics, *scores]), source.spec
    nothing = Curves(spec.model, spec.revision or "default", spec.num_layers, {}, {}, {})
    found = nothing if frame.is_empty() else curves(frame)
    auto, evidence = without, None
    if right is not None:
        without = without or choose(replace(found, tasks={}, score={}), "auto")
        auto = _weighed(found, right, *without, seed=given.seed)
        evidence = _evidence(right, auto[0] if rule == "auto" else None, seed=given.seed)
    return answer(found, frame, rule=rule, labels=evidence, lacking=lacking, auto=auto, mixture=mixture)


def _score_rows(source: LayerSource, right: Tensor) -> pl.DataFrame:
    values = dict(enumerate(right.mean(dim=1).tolist()))
    return tidy_frame(tidy_rows(values, source.spec, kind="score", dataset=LABELS, name="accuracy"))


def surely_better(right: Tensor, layer: int, other: int, *, seed: int = 0) -> bool:
    """Return whether a layer beats another on 97.5 % of the draws of as many texts; ``right`` is ``(L, N)``.

    Example:
        >>> surely_better(torch.tensor([[1.0] * 20, [0.0] * 20]), 0, 1)
        True
    """
    means = resampled_means(right[[layer, other]], seed=seed)
    return float(torch.quantile(means[:, 0] - means[:, 1], 0.025)) > 0


def _weighed(found: Curves, right: Tensor, without: int, words: str, *, seed: int) -> tuple[int, str]:
    """Return what ``auto`` makes of labels: their layer where it is surely better than what it takes without them."""
    if len(set(found.score.values())) == 1:
        return without, f"{words}; the labels tell no layer from another"
    layer, reason = choose(found, "few-labels")
    if layer == without:
        return layer, f"few-labels: {reason}, and {words}"
    if surely_better(right, layer, without, seed=seed):
        return layer, f"few-labels: {reason}, surely more than at layer {without}, the choice without labels"
    return without, f"{words}; few-labels would take layer {layer}, but {right.shape[1]} labels do not make that sure"


def _by_layer(values: Tensor) -> ByLayer:
    return {layer: value for layer, value in enumerate(values.tolist()) if value == value}


def _evidence(right: Tensor, layer: int | None, *, seed: int) -> LabelEvidence:
    """Return what draws of as many texts say about a layer, by default the labels' own, against the last."""
    means = resampled_means(right, seed=seed)
    chosen = best_layer(_by_layer(right.mean(dim=1))) if layer is None else layer
    others = torch.tensor([best_layer(_by_layer(row)) for row in means]).double()
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(100 * (means[:, chosen] - means[:, -1]), bounds).tolist()
    first, last = torch.quantile(others, bounds, interpolation="nearest").long().tolist()
    gain = 100 * float(right[chosen].mean() - right[-1].mean())
    return LabelEvidence(right.shape[1], (first, last), gain, low, high)
