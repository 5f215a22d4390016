"""Choose a recipe and its layer: the default for the kind of model, unless labels favor another significantly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders._types import Stage
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import curves, tidy_frame
from midlayer_encoders.reading.batches import LayerSource
from midlayer_encoders.recipes import PLAIN, RECIPES, SMALLEST_SAMPLE, Recipe, middle_directions, vector_map
from midlayer_encoders.selection.default_recipes import KIND_NAMES, default_depth, default_recipe, model_kind
from midlayer_encoders.selection.layer_scores import (
    SelectionInputs,
    label_accuracy,
    label_vectors,
    measure_metrics,
    select_from_scores,
)
from midlayer_encoders.selection.ridge import gain_interval
from midlayer_encoders.selection.rules import CannotChooseError, is_embedding_model
from midlayer_encoders.selection.selection_result import (
    LabelEvidence,
    RecipeSelection,
    Selection,
    combine_recipes,
    make_selection,
)


class RecipeSource(LayerSource, Protocol):
    """An encoder that can apply other recipes."""

    def with_recipe(self, recipe: Recipe | str) -> LayerSource:
        """Return an encoder that shares the model and applies a recipe."""

    def output_embeddings(self) -> Tensor:
        """Return the output embeddings of the language model, shape ``(T, D)``."""


def select_in_frame(frame: pl.DataFrame, rule: str) -> Selection:
    """Return the selection from a tidy frame; with several recipes, of the one with the best score."""
    names = frame["recipe"].unique(maintain_order=True).to_list() if "recipe" in frame.columns else []
    if len(names) < 2:
        return make_selection(curves(frame), frame, rule=rule)
    parts = {}
    scores = {}
    for name in names:
        rows = frame.filter(recipe=name)
        recipe_curves = curves(rows)
        parts[name] = make_selection(recipe_curves, rows.drop("recipe"), rule=rule)
        if parts[name].layer not in recipe_curves.score:
            raise CannotChooseError(
                f"`frame` must hold scores of every recipe to choose between them, but {name!r} has none at layer "
                f"{parts[name].layer}. Filter it first, or sweep with `tasks`."
            )
        scores[name] = recipe_curves.score[parts[name].layer]
    best = max(scores, key=scores.__getitem__)
    reason = f"the highest score of {len(names)} recipes, {100 * scores[best]:.1f}; {parts[best].reason}"
    return combine_recipes(parts, best, reason)


def select_recipe(source: RecipeSource, inputs: SelectionInputs, recipes: Sequence[Recipe]) -> RecipeSelection:
    """Return the chosen recipe and layer, with the selection of every other recipe.

    Args:
        source: the encoder of a whole model, without a template.
        inputs: texts and labels.
        recipes: the candidates.
    """
    count = len(inputs.texts or ())
    if count < SMALLEST_SAMPLE and (centered := [recipe.name for recipe in recipes if recipe.center]):
        raise OptionError(
            f"`texts` must be at least {SMALLEST_SAMPLE}, a few hundred better, for {centered[0]!r}, which centers on "
            f"them, but got {count}. Give more, or leave that recipe out."
        )
    plain = RECIPES[PLAIN]
    sources = {recipe.name: source if recipe == plain else source.with_recipe(recipe) for recipe in recipes}
    plain_metrics, unmeasured = measure_metrics(source, inputs)
    kind = model_kind(source, tuned=not plain_metrics.is_empty() and is_embedding_model(curves(plain_metrics)))
    stage = Stage(inputs.progress, "labels", len(inputs.labeled) * len(recipes))
    parts: dict[str, Selection] = {}
    accuracies: dict[str, Tensor] = {}
    for recipe in recipes:
        name = recipe.name
        if inputs.classes is not None:
            vectors = label_vectors(sources[name], inputs, stage.step)
            accuracies[name] = label_accuracy(_transform_vectors(vectors, recipe, source), inputs)
        metrics, reason = plain_metrics, unmeasured
        if recipe != plain:
            metrics, reason = tidy_frame(()), "is measured on the plain text alone"
        depth = default_depth(recipe, kind)
        default = round(depth * source.num_layers), f"{depth} of {source.num_layers} blocks, the default depth"
        parts[name] = select_from_scores(
            sources[name], inputs, metrics, accuracies.get(name), unmeasured=reason, default=default
        )
    chosen = default_recipe(recipes, kind)
    reason = f"the default for {KIND_NAMES[kind]}"
    labels = None
    if accuracies:
        chosen, reason = _weigh_labels(recipes, parts, accuracies, chosen, reason, seed=inputs.seed)
        labels = _label_evidence(parts, accuracies, chosen.name, seed=inputs.seed)
    center = tuple(inputs.sample) if chosen.center and inputs.texts else None
    reason = f"{reason}; {parts[chosen.name].reason}"
    return combine_recipes(parts, chosen.name, reason, labels=labels, recipe=chosen, center=center)


def _transform_vectors(vectors: Tensor, recipe: Recipe, source: RecipeSource) -> Tensor:
    """Return vectors ``(L, N, D)`` transformed by a recipe, fitted for each layer on these texts."""
    if recipe.center or recipe.embed_filter:
        if source.truncate_dim is not None:
            raise OptionError(f"`truncate_dim` must be None with {recipe.name!r}, which maps whole vectors.")
        projection = middle_directions(source.output_embeddings()) if recipe.embed_filter else None
        transformed = []
        for rows in vectors.double().cpu():
            sample = rows if recipe.center else None
            matrix, offset = vector_map(sample, width=rows.shape[-1], whiten=recipe.whiten, projection=projection)
            transformed.append(rows @ matrix.mT + offset)
        vectors = torch.stack(transformed)
    return torch.nn.functional.normalize(vectors, dim=-1) if recipe.normalize else vectors


def _weigh_labels(
    recipes: Sequence[Recipe],
    parts: Mapping[str, Selection],
    accuracies: Mapping[str, Tensor],
    default: Recipe,
    reason: str,
    *,
    seed: int,
) -> tuple[Recipe, str]:
    """Return another recipe than the default if it is significantly better on the labels, each at its layer."""
    accuracy = {name: accuracies[name][part.layer] for name, part in parts.items()}
    best = max(recipes, key=lambda recipe: (float(accuracy[recipe.name].mean()), recipe == default))
    if best == default:
        return default, f"{reason}, with the highest accuracy on the labels too"
    if gain_interval(accuracy[best.name], accuracy[default.name], seed=seed)[0] > 0:
        points = 100 * float(accuracy[best.name].mean())
        return (best, f"its accuracy on the labels, {points:.1f}, is significantly more than that of {default.name}")
    count = len(accuracy[best.name])
    return default, f"{reason}; {best.name} is more accurate on the labels, but {count} labels are not enough"


def _label_evidence(
    parts: Mapping[str, Selection], accuracies: Mapping[str, Tensor], recipe: str, *, seed: int
) -> LabelEvidence | None:
    """Return the evidence for a recipe against the plain text at the last layer, if that is among the recipes."""
    evidence = parts[recipe].labels
    if evidence is None or PLAIN not in accuracies or recipe == PLAIN:
        return evidence
    accuracy = accuracies[recipe][parts[recipe].layer]
    baseline = accuracies[PLAIN][-1]
    low, high = gain_interval(accuracy, baseline, seed=seed)
    gain = float(accuracy.mean() - baseline.mean())
    against = "the plain text at the last layer"
    return replace(evidence, gain=100 * gain, low=100 * low, high=100 * high, against=against)
