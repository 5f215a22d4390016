"""A selection from an encoder: its layers measured on texts, and on labels where there are some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders._types import Progress, Stage
from midlayer_encoders.errors import (
    OptionError,
    check_count,
    check_effect,
    check_flag,
    check_list,
    check_progress,
    check_seed,
)
from midlayer_encoders.frame import Curves, check_blocks, curves, tidy_frame, tidy_rows
from midlayer_encoders.measuring import measure_layers, num_passes
from midlayer_encoders.media import medium_of
from midlayer_encoders.metrics.half_match import LEAST_TOKENS
from midlayer_encoders.reading.batches import batches_of, count_tokens
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.selection.answer import LabelEvidence, Selection, answer
from midlayer_encoders.selection.mixture import Mixture, held_out_mixture
from midlayer_encoders.selection.ridge import (
    check_labels,
    class_numbers,
    equal_steps,
    label_list,
    resampled_means,
    ridge_correct,
)
from midlayer_encoders.selection.rules import RULES, best_layer, choose, metrics_of

__all__ = ["LABELS", "LEAST_TEXTS", "select", "selection_passes", "surely_better"]

LABELS = "your labels"
"""What a frame calls the scores on labels: accuracy, cross-validated."""

LEAST_TEXTS = 16
"""Fewer texts than this say nothing about a layer."""

_ONE_PASS = ("half_match", "prompt_entropy", "dataset_entropy")
_OF_LABELS = ("auto", "few-labels")
_REPEATS = 300  # labels times repeats of the folds: few labels depend on how they are dealt


def select(
    source: LayerSource | pl.DataFrame,
    texts: Sequence[str] | None = None,
    labels: Sequence[int | str | None] | None = None,
    *,
    rule: str = "auto",
    all_rules: bool = False,
    mixture: bool = False,
    max_texts: int = 500,
    seed: int = 0,
    token_budget: int = 4096,
    progress: Progress | None = None,
) -> Selection:
    """Return which layer to take, by one rule, beside what all others say.

    One forward pass over the texts serves the rules without labels, and one over the labeled texts ``few-labels``. The
    rules on DiME and InfoNCE need two more, over augmented views: they are measured when asked for.

    Args:
        source: the encoder of a whole model, ``LayerEncoder(model, -1)``, or a tidy frame of one model: metrics, scores
            or both.
        texts: a few hundred of your own; none leaves the rules that look at nothing.
        labels: the class of each text, ``None`` for those without; a handful of each class is enough.
        rule: a name in ``RULES``, or ``min-`` and metrics joined by ``+``.
        all_rules: measure what every rule needs, in three passes instead of one.
        mixture: also learn a mean of several layers from the labels; ``Selection.keywords`` holds it where it is surely
            better than the best single layer.
        max_texts: how many texts are looked at: at equal steps through the list where there are more.
        seed: of augmented views, folds and resamples.
        token_budget: tokens in a batch.
        progress: called after each batch, with the stages ``"measuring"`` and ``"labels"``.

    Raises:
        CannotChooseError: when the rule has not what it needs: it says what.
    """
    wanted = metrics_of(rule)  # a wrong name is refused first
    seed, max_texts = check_seed(seed), check_count("max_texts", max_texts)
    token_budget, all_rules = check_count("token_budget", token_budget), check_flag("all_rules", all_rules)
    check_progress(progress)
    mixture = _checked_mixture(mixture, rule, labels)
    if isinstance(source, pl.DataFrame):
        check_effect(
            select, "with a frame, of which nothing is measured", all_rules=all_rules, max_texts=max_texts,
            token_budget=token_budget, mixture=mixture,
        )  # fmt: skip
        if texts is not None or labels is not None:
            raise OptionError("`texts` and `labels` must be None with a frame: give the model to measure them on.")
        return answer(curves(source), source, rule=rule)
    _check_encoder(source)
    texts = None if texts is None else check_list("texts", texts, least=0)
    options: dict[str, Any] = {"seed": seed, "token_budget": token_budget, "progress": progress}
    labeled, classes = _labeled(texts, labels, max_texts)  # wrong labels are refused before a pass is made
    frames, lacking, right, learned = [], _too_few(texts), None, None
    if texts is not None and not lacking:
        some = [texts[place] for place in equal_steps(len(texts), max_texts)]
        names = _measured(source, some, wanted, all_rules)
        if names:
            frames.append(measure_layers(source, some, metrics=names, **options))
    if classes is not None:
        right, learned = _right(source, labeled, classes, mixture=mixture, **options)
        frames.append(_score_rows(source, right))
    frame = pl.concat([tidy_frame(()), *frames])
    spec = source.spec
    found = curves(frame) if frames else Curves(spec.model, spec.revision or "default", spec.num_layers, {}, {}, {})
    auto = None if right is None else _weighed(found, right, seed=seed)
    evidence = None if right is None else _evidence(right, auto[0] if rule == "auto" and auto else None, seed=seed)
    return answer(found, frame, rule=rule, labels=evidence, lacking=lacking, auto=auto, mixture=learned)


def _checked_mixture(mixture: bool, rule: str, labels: Sequence[Any] | None) -> bool:
    """Return whether a mixture is learned, or raise where it cannot be."""
    if not check_flag("mixture", mixture):
        return False
    if labels is None:
        raise OptionError(
            "`mixture` must be False without labels: its weights are learned from them. Pass `labels`, or a list of "
            "layers to LayerEncoder for their mean."
        )
    if rule not in _OF_LABELS:
        raise OptionError(f"`mixture` must be False with rule={rule!r}, which looks at no labels. Pass rule='auto'.")
    return True


def selection_passes(rule: str, *, labeled: bool = False, all_rules: bool = False) -> int:
    """Return how many forward passes over the texts a selection takes; the one over labeled texts may be shorter.

    Example:
        >>> selection_passes("auto"), selection_passes("min-dime"), selection_passes("auto", labeled=True)
        (1, 3, 2)
    """
    return num_passes(_names(metrics_of(rule), all_rules)) + labeled


def _names(wanted: Sequence[str], all_rules: bool) -> list[str]:
    """Return the metrics to measure: those of one pass always, since they cost no more."""
    every = [metric for rule in RULES for metric in metrics_of(rule)] if all_rules else []
    return list(dict.fromkeys([*_ONE_PASS, *wanted, *every]))


def _measured(encoder: LayerSource, texts: Sequence[str], wanted: Sequence[str], all_rules: bool) -> list[str]:
    """Return the metrics to measure on these texts, without those that want longer ones."""
    of_text = medium_of(texts[0], encoder.media) == "text"
    counts = count_tokens(encoder, texts) if of_text else [LEAST_TOKENS] * len(texts)
    long_enough = sum(count >= LEAST_TOKENS for count in counts)
    short = ("half_match", "prompt_entropy") if long_enough < LEAST_TEXTS else ()
    return [name for name in _names(wanted, all_rules) if name not in short]


def _check_encoder(encoder: LayerSource) -> None:
    check_blocks(encoder.num_layers, encoder.spec.model)
    if encoder.spec.layers:
        raise OptionError(
            f"`model` must have one stack of layers to choose from, but {encoder.spec.model} has two towers. "
            "Pass `tower` to choose for one of them."
        )
    if encoder.layer != encoder.num_layers:
        raise OptionError(
            f"`model` must be an encoder of the whole model to choose between its layers, but got one cut at layer "
            f"{encoder.layer} of {encoder.num_layers}. Make it with layer=-1."
        )


def _labeled(
    texts: Sequence[str] | None, labels: Sequence[int | str | None] | None, most: int
) -> tuple[list[str], Tensor | None]:
    """Return the texts that have labels, at equal steps where there are more than ``most``, and their classes."""
    if labels is None:
        return [], None
    labels = label_list("labels", labels)
    if texts is None or len(texts) != len(labels):
        raise OptionError(
            f"`labels` must be one for each text, None for those without, but got {len(labels)} labels and "
            f"{0 if texts is None else len(texts)} texts."
        )
    known = [(text, str(label)) for text, label in zip(texts, labels, strict=True) if label is not None]
    known = [known[place] for place in equal_steps(len(known), most)]
    classes, _ = class_numbers([label for _, label in known])
    check_labels(classes)
    return [text for text, _ in known], classes


def _too_few(texts: Sequence[str] | None) -> str:
    count = 0 if texts is None else len(texts)
    if count < LEAST_TEXTS:
        return f"needs {LEAST_TEXTS} texts or more, but got {count or 'none'}"
    different = len(set(texts)) if texts is not None and all(isinstance(text, str) for text in texts) else count
    return f"needs {LEAST_TEXTS} different texts or more, but got {different}" if different < LEAST_TEXTS else ""


def _right(
    encoder: LayerSource,
    texts: Sequence[str],
    classes: Tensor,
    *,
    mixture: bool,
    seed: int,
    token_budget: int,
    progress: Progress | None,
) -> tuple[Tensor, Mixture | None]:
    """Return how often each layer labels each text rightly, over a few ways to deal the folds, shape ``(L, N)``.

    And a mixture of layers, where one is asked for.
    """
    prompt = encoder.default_prompt
    reader = layer_reader(encoder, prompt=prompt)
    batches = batches_of(encoder, texts, token_budget=token_budget, prompt=prompt)
    vectors = reader.vectors(texts, batches, done=Stage(progress, "labels", len(texts)).step)
    repeats = max(1, min(3, _REPEATS // len(texts)))
    draws = [ridge_correct(vectors, classes, seed=seed + repeat) for repeat in range(repeats)]
    right = torch.stack(draws).double().mean(dim=0)
    if not mixture:
        return right, None
    return right, held_out_mixture(vectors, classes, right, reader.layers, repeats=repeats, seed=seed)


def _score_rows(encoder: LayerSource, right: Tensor) -> pl.DataFrame:
    values = dict(enumerate(right.mean(dim=1).tolist()))
    return tidy_frame(tidy_rows(values, encoder.spec, kind="score", dataset=LABELS, name="accuracy"))


def surely_better(right: Tensor, layer: int, other: int, *, seed: int = 0) -> bool:
    """Return whether a layer beats another on 97.5 % of the draws of as many texts; ``right`` is ``(L, N)``.

    Example:
        >>> surely_better(torch.tensor([[1.0] * 20, [0.0] * 20]), 0, 1)
        True
    """
    means = resampled_means(right[[layer, other]], seed=seed)
    return float(torch.quantile(means[:, 0] - means[:, 1], 0.025)) > 0


def _weighed(found: Curves, right: Tensor, *, seed: int) -> tuple[int, str]:
    """Return what ``auto`` makes of labels: their layer where it is surely better than what it takes without them."""
    without, words = choose(replace(found, tasks={}, score={}), "auto")
    if len(set(found.score.values())) == 1:
        return without, f"{words}; the labels tell no layer from another"
    layer, reason = choose(found, "few-labels")
    if layer == without:
        return layer, f"few-labels: {reason}, and {words}"
    if surely_better(right, layer, without, seed=seed):
        return layer, f"few-labels: {reason}, surely more than at layer {without}, the choice without labels"
    return without, f"{words}; few-labels would take layer {layer}, but {right.shape[1]} labels do not make that sure"


def _evidence(right: Tensor, layer: int | None, *, seed: int) -> LabelEvidence:
    """Return what draws of as many texts say about a layer, by default the labels' own, against the last."""
    means = resampled_means(right, seed=seed)
    chosen = best_layer(dict(enumerate(right.mean(dim=1).tolist()))) if layer is None else layer
    others = torch.tensor([best_layer(dict(enumerate(row))) for row in means.tolist()]).double()
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(100 * (means[:, chosen] - means[:, -1]), bounds).tolist()
    first, last = torch.quantile(others, bounds, interpolation="nearest").long().tolist()
    gain = 100 * float(right[chosen].mean() - right[-1].mean())
    return LabelEvidence(right.shape[1], (first, last), gain, low, high)
