"""Select a layer of an encoder from texts and labels, or from a frame of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
from torch import Tensor

from midlayer_encoders._types import Progress, Stage
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import check_blocks
from midlayer_encoders.measuring import num_passes
from midlayer_encoders.reading.batches import LayerSource
from midlayer_encoders.recipes import Recipe, recipes_of
from midlayer_encoders.selection.layer_scores import (
    SelectionInputs,
    label_accuracy,
    label_vectors,
    measure_metrics,
    metric_names,
    select_from_scores,
)
from midlayer_encoders.selection.mixture import held_out_mixture
from midlayer_encoders.selection.recipe_selection import RecipeSource, select_in_frame, select_recipe
from midlayer_encoders.selection.ridge import check_labels, class_numbers, equal_steps, label_list
from midlayer_encoders.selection.rules import metrics_of
from midlayer_encoders.selection.selection_result import Selection
from midlayer_encoders.validation import check_count, check_effect, check_flag, check_list, check_progress, check_seed


def select(
    source: RecipeSource | pl.DataFrame,
    texts: Sequence[str] | None = None,
    labels: Sequence[int | str | None] | None = None,
    *,
    rule: str = "auto",
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    all_rules: bool = False,
    mixture: bool = False,
    max_texts: int = 500,
    seed: int = 0,
    token_budget: int = 4096,
    progress: Progress | None = None,
) -> Selection:
    """Return the layer that a rule chooses, with the choices of all other rules.

    One forward pass over the texts serves the rules without labels, and one over the labeled texts ``few-labels``. The
    rules on DiME and InfoNCE need two more, over augmented views, and are measured only on request.

    Args:
        source: the encoder of a whole model, ``LayerEncoder(model, -1)``, or a tidy frame of one model: metrics, scores
            or both.
        texts: a few hundred typical texts; without them, only rules without metrics apply.
        labels: the class of each text, ``None`` for unlabeled ones; a handful per class is enough.
        rule: a name in ``RULES``, or ``min-`` and metrics joined by ``+``.
        recipes: as in :func:`~midlayer_encoders.sweep`: also choose a recipe. With labels, every layer of each recipe
            is scored, in one pass each; without them, recipe and layer are the defaults for the kind of model.
        all_rules: measure the metrics of every rule, in three passes instead of one.
        mixture: also learn a weighted mean of layers from the labels; ``Selection.keywords`` holds it if it is
            significantly better than the best single layer.
        max_texts: maximum number of texts to measure, at equal steps through the list.
        seed: for augmented views, folds and resamples.
        token_budget: tokens in a batch.
        progress: called after each batch, with the stages ``"measuring"`` and ``"labels"``.

    Raises:
        CannotChooseError: if the rule lacks its input.
    """
    requested = metrics_of(rule)  # rejects an unknown rule first
    seed = check_seed(seed)
    max_texts = check_count("max_texts", max_texts)
    token_budget = check_count("token_budget", token_budget)
    all_rules = check_flag("all_rules", all_rules)
    mixture = check_flag("mixture", mixture)
    check_progress(progress)
    if mixture:
        _check_mixture(rule, labels)
    options: dict[str, Any] = {"all_rules": all_rules, "mixture": mixture}
    if isinstance(source, pl.DataFrame):
        options |= {"max_texts": max_texts, "token_budget": token_budget, "recipes": recipes}
        check_effect(select, "with a frame, of which nothing is measured", **options)
        if texts is not None or labels is not None:
            raise OptionError("`texts` and `labels` must be None with a frame: give the model to measure them on.")
        return select_in_frame(source, rule)
    _check_encoder(source)
    texts = None if texts is None else check_list("texts", texts, minimum=0)
    labeled, classes = _labeled_texts(texts, labels, max_texts)
    inputs = SelectionInputs(texts, labeled, classes, max_texts, seed, token_budget, progress)
    if recipes is not None:
        reason = "with `recipes`, of which one is chosen by labels, or by the model's kind"
        check_effect(select, reason, rule=rule, **options)
        return select_recipe(source, inputs, recipes_of("recipes", recipes))
    metrics, unmeasured = measure_metrics(source, inputs, requested, all_rules=all_rules)
    accuracy = None
    learned = None
    if classes is not None:
        vectors = label_vectors(source, inputs, Stage(progress, "labels", len(labeled)).step)
        accuracy = label_accuracy(vectors, inputs)
        if mixture:
            layers = range(source.num_layers + 1)
            learned = held_out_mixture(vectors, classes, accuracy, layers, repeats=inputs.repeats, seed=seed)
    return select_from_scores(source, inputs, metrics, accuracy, rule=rule, unmeasured=unmeasured, mixture=learned)


def _check_mixture(rule: str, labels: Sequence[Any] | None) -> None:
    """Raise if a mixture is requested without labels, or with a rule that ignores them."""
    if labels is None:
        raise OptionError(
            "`mixture` must be False without labels: its weights are learned from them. Pass `labels`, or a list of "
            "layers to LayerEncoder for their mean."
        )
    if rule not in ("auto", "few-labels"):
        raise OptionError(f"`mixture` must be False with rule={rule!r}, which ignores labels. Pass rule='auto'.")


def selection_passes(rule: str, *, labeled: bool = False, all_rules: bool = False) -> int:
    """Return the number of forward passes over the texts that a selection takes, one of them over labeled texts only.

    Example:
        >>> selection_passes("auto"), selection_passes("min-dime"), selection_passes("auto", labeled=True)
        (1, 3, 2)
    """
    return num_passes(metric_names(metrics_of(rule), all_rules)) + labeled


def _check_encoder(encoder: LayerSource) -> None:
    check_blocks(encoder.num_layers, encoder.spec.model)
    if encoder.spec.tower_layers:
        raise OptionError(
            f"`model` must have one stack of layers to choose from, but {encoder.spec.model} has two towers. "
            "Pass `tower` to choose for one of them."
        )
    if encoder.layer != encoder.num_layers:
        raise OptionError(
            f"`model` must be an encoder of the whole model to choose between its layers, but got one cut at layer "
            f"{encoder.layer} of {encoder.num_layers}. Make it with layer=-1."
        )


def _labeled_texts(
    texts: Sequence[str] | None, labels: Sequence[int | str | None] | None, max_texts: int
) -> tuple[list[str], Tensor | None]:
    """Return the labeled texts, at equal steps if there are more than ``max_texts``, and their classes."""
    if labels is None:
        return [], None
    labels = label_list("labels", labels)
    num_texts = len(texts or ())
    if texts is None or num_texts != len(labels):
        raise OptionError(
            f"`labels` must be one for each text, None for those without, but got {len(labels)} labels and "
            f"{num_texts} texts."
        )
    pairs = [(text, str(label)) for text, label in zip(texts, labels, strict=True) if label is not None]
    pairs = [pairs[position] for position in equal_steps(len(pairs), max_texts)]
    classes, _ = class_numbers([label for _, label in pairs])
    check_labels(classes)
    return [text for text, _ in pairs], classes
