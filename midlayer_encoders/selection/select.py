"""A selection from an encoder: its layers measured on texts, and on labels where there are some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
from torch import Tensor

from midlayer_encoders._types import Progress, Stage
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import check_blocks
from midlayer_encoders.measuring import num_passes
from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.recipes import Recipe, recipes_of
from midlayer_encoders.selection.layer_scores import (
    Given,
    answered,
    how_often_right,
    label_vectors,
    measured,
    metric_names,
)
from midlayer_encoders.selection.mixture import held_out_mixture
from midlayer_encoders.selection.recipe_selection import RecipeSource, select_in_frame, select_recipe
from midlayer_encoders.selection.ridge import check_labels, class_numbers, equal_steps, label_list
from midlayer_encoders.selection.rules import metrics_of
from midlayer_encoders.selection.selection_result import Selection
from midlayer_encoders.validation import check_count, check_effect, check_flag, check_list, check_progress, check_seed

__all__ = ["select", "selection_passes"]

_OF_LABELS = ("auto", "few-labels")


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
    """Return which layer to take, by one rule, beside what all others say.

    One forward pass over the texts serves the rules without labels, and one over the labeled texts ``few-labels``. The
    rules on DiME and InfoNCE need two more, over augmented views: they are measured when asked for.

    Args:
        source: the encoder of a whole model, ``LayerEncoder(model, -1)``, or a tidy frame of one model: metrics, scores
            or both.
        texts: a few hundred of your own; none leaves the rules that look at nothing.
        labels: the class of each text, ``None`` for those without; a handful of each class is enough.
        rule: a name in ``RULES``, or ``min-`` and metrics joined by ``+``.
        recipes: as in :func:`~midlayer_encoders.sweep`: also choose how texts are asked. With labels every layer of
            each recipe is scored, in a pass each; without them the recipe and its layer are those of the model's kind.
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
            token_budget=token_budget, mixture=mixture, recipes=recipes,
        )  # fmt: skip
        if texts is not None or labels is not None:
            raise OptionError("`texts` and `labels` must be None with a frame: give the model to measure them on.")
        return select_in_frame(source, rule)
    _check_encoder(source)
    texts = None if texts is None else check_list("texts", texts, minimum=0)
    labeled, classes = _labeled(texts, labels, max_texts)  # wrong labels are refused before a pass is made
    given = Given(texts, labeled, classes, max_texts, seed, token_budget, progress)
    if recipes is not None:
        check_effect(
            select, "with `recipes`, of which one is chosen by labels, or by the model's kind", rule=rule,
            all_rules=all_rules, mixture=mixture,
        )  # fmt: skip
        return select_recipe(source, given, recipes_of("recipes", recipes))
    metrics, lacking = measured(source, given, wanted, all_rules=all_rules)
    right, learned = None, None
    if classes is not None:
        vectors = label_vectors(source, given, Stage(progress, "labels", len(labeled)).step)
        right = how_often_right(vectors, given)
        if mixture:
            layers = range(source.num_layers + 1)
            learned = held_out_mixture(vectors, classes, right, layers, repeats=given.repeats, seed=seed)
    return answered(source, given, metrics, right, rule=rule, lacking=lacking, mixture=learned)


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
