"""Which recipe and which of its layers: those of the model's kind, unless labels make others surely better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders._types import Stage
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import curves, tidy_frame
from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.recipes import PLAIN, RECIPES, SMALLEST_SAMPLE, Recipe
from midlayer_encoders.recipes.vectors import middle_directions, vector_map
from midlayer_encoders.selection.default_recipes import EVIDENCE, default_depth, default_recipe, model_kind
from midlayer_encoders.selection.layer_scores import (
    Given,
    answered,
    how_often_right,
    label_vectors,
    measured,
    surely_better,
)
from midlayer_encoders.selection.ridge import resampled_means
from midlayer_encoders.selection.rules import CannotChooseError, made_for_texts
from midlayer_encoders.selection.selection_result import LabelEvidence, RecipeSelection, Selection, answer, with_recipes

__all__ = ["RecipeSource", "select_in_frame", "select_recipe"]


class RecipeSource(LayerSource, Protocol):
    """An encoder that can be asked in other ways."""

    def with_recipe(self, recipe: Recipe | str) -> LayerSource:
        """Return the encoder that shares its model, and asks it by a recipe."""

    def output_embeddings(self) -> Tensor:
        """Return the embeddings by which the model chooses its next token, shape ``(T, D)``."""


def select_in_frame(frame: pl.DataFrame, rule: str) -> Selection:
    """Return the selection from a tidy frame; of several recipes in it, that with the best score."""
    names = frame["recipe"].unique(maintain_order=True).to_list() if "recipe" in frame.columns else []
    if len(names) < 2:
        return answer(curves(frame), frame, rule=rule)
    found = {name: curves(frame.filter(recipe=name)) for name in names}
    parts = {name: answer(one, frame.filter(recipe=name).drop("recipe"), rule=rule) for name, one in found.items()}
    scores = {name: one.score[parts[name].layer] for name, one in found.items() if parts[name].layer in one.score}
    if lacking := [name for name in names if name not in scores]:
        raise CannotChooseError(
            f"`frame` must hold scores of every recipe to choose between them, but {lacking[0]!r} has none at layer "
            f"{parts[lacking[0]].layer}. Filter it first, or sweep with `tasks`."
        )
    best = max(scores, key=scores.__getitem__)
    words = f"the highest score of {len(names)} recipes, {100 * scores[best]:.1f}; {parts[best].reason}"
    return with_recipes(parts, best, words)


def select_recipe(source: RecipeSource, given: Given, recipes: Sequence[Recipe]) -> RecipeSelection:
    """Return the recipe and the layer to take, beside what was chosen for every other recipe.

    Args:
        source: the encoder of a whole model, without a template.
        given: texts and labels.
        recipes: to choose between.
    """
    plain, count = RECIPES[PLAIN], len(given.texts or ())
    if count < SMALLEST_SAMPLE and (centered := [one.name for one in recipes if one.center]):
        raise OptionError(
            f"`texts` must be at least {SMALLEST_SAMPLE}, a few hundred better, for {centered[0]!r}, which centers on "
            f"them, but got {count}. Give more, or leave that recipe out."
        )
    asked = {one.name: source if one == plain else source.with_recipe(one) for one in recipes}
    metrics, lacking = measured(source, given)
    kind = model_kind(source, tuned=not metrics.is_empty() and made_for_texts(curves(metrics)))
    stage = Stage(given.progress, "labels", len(given.labeled) * len(recipes))
    parts: dict[str, Selection] = {}
    right: dict[str, Tensor] = {}
    for recipe in recipes:
        name, depth = recipe.name, default_depth(recipe, kind)
        if given.classes is not None:
            vectors = label_vectors(asked[name], given, stage.step)
            right[name] = how_often_right(_changed(vectors, recipe, source), given)
        own, why = (metrics, lacking) if recipe == plain else (tidy_frame(()), "is measured on the plain text alone")
        without = round(depth * source.num_layers), f"{depth} of {source.num_layers} blocks, the default depth"
        parts[name] = answered(asked[name], given, own, right.get(name), lacking=why, without=without)
    chosen, reason = default_recipe(recipes, kind), f"the default {EVIDENCE[kind]}"
    if right:
        chosen, reason = _weighed(recipes, parts, right, chosen, reason, seed=given.seed)
    return with_recipes(
        parts, chosen.name, f"{reason}; {parts[chosen.name].reason}", asked=chosen,
        labels=_evidence(parts, right, chosen.name, seed=given.seed) if right else None,
        center=tuple(given.some) if chosen.center and given.texts else None,
    )  # fmt: skip


def _changed(vectors: Tensor, recipe: Recipe, source: RecipeSource) -> Tensor:
    """Return vectors ``(L, N, D)`` with what a recipe does to them, fitted for each layer on these texts."""
    if recipe.center or recipe.embed_filter:
        if source.truncate_dim is not None:
            raise OptionError(f"`truncate_dim` must be None with {recipe.name!r}, which maps whole vectors.")
        projection = middle_directions(source.output_embeddings()) if recipe.embed_filter else None
        width, changed = vectors.shape[-1], []
        for rows in vectors.double().cpu():
            sample = rows if recipe.center else None
            matrix, offset = vector_map(sample, width=width, whiten=recipe.whiten, projection=projection)
            changed.append(rows @ matrix.mT + offset)
        vectors = torch.stack(changed)
    return torch.nn.functional.normalize(vectors, dim=-1) if recipe.normalize else vectors


def _weighed(
    recipes: Sequence[Recipe],
    parts: Mapping[str, Selection],
    right: Mapping[str, Tensor],
    first: Recipe,
    words: str,
    *,
    seed: int,
) -> tuple[Recipe, str]:
    """Return what labels make of the default recipe: another where it is surely better, each at its own layer."""
    rows = {name: right[name][part.layer] for name, part in parts.items()}
    best = max(recipes, key=lambda one: (float(rows[one.name].mean()), one == first))
    if best == first:
        return first, f"{words}, with the highest accuracy on the labels too"
    if surely_better(torch.stack([rows[best.name], rows[first.name]]), 0, 1, seed=seed):
        points = 100 * float(rows[best.name].mean())
        return best, f"its accuracy on the labels is highest, {points:.1f}, surely more than that of {first.name}"
    return first, f"{words}; {best.name} has more on the labels, but {len(rows[best.name])} do not make that sure"


def _evidence(
    parts: Mapping[str, Selection], right: Mapping[str, Tensor], recipe: str, *, seed: int
) -> LabelEvidence | None:
    """Return what draws of as many texts say about the choice, against the plain text at the last layer."""
    seen = parts[recipe].labels
    if seen is None or PLAIN not in right or recipe == PLAIN:
        return seen
    means = resampled_means(torch.stack([right[recipe][parts[recipe].layer], right[PLAIN][-1]]), seed=seed)
    gains = 100 * (means[:, 0] - means[:, 1])
    low, high = torch.quantile(gains, torch.tensor([0.025, 0.975], dtype=gains.dtype)).tolist()
    gain = 100 * float(right[recipe][parts[recipe].layer].mean() - right[PLAIN][-1].mean())
    return LabelEvidence(seen.count, seen.layers, gain, low, high, "the plain text at the last layer")
