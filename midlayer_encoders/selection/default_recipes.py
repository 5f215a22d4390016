"""Default recipe and depth for each kind of model, without labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from midlayer_encoders.reading.batches import LayerSource
from midlayer_encoders.reading.causal import looks_ahead
from midlayer_encoders.recipes import PLAIN, Recipe
from midlayer_encoders.selection.rules import DEPTH

ModelKind: TypeAlias = Literal["tuned", "causal", "bidirectional", "media"]
"""An embedding model, a causal or bidirectional text model, or a model of images or audio."""

MODEL_KINDS: tuple[ModelKind, ...] = get_args(ModelKind)

DEFAULTS: Mapping[ModelKind, Mapping[str, float]] = {
    "tuned": {PLAIN: 1.0},
    "causal": {"one-word": 0.95, "summarize": 0.95, "echo": 0.95, PLAIN: DEPTH},
    "bidirectional": {PLAIN: DEPTH},
    "media": {PLAIN: DEPTH},
}
"""Recipes in order of preference and their depths, for every kind; see benchmarks/selection/README.md."""

KIND_NAMES: Mapping[ModelKind, str] = {
    "tuned": "an embedding model",
    "causal": "a causal language model that was not tuned for embeddings",
    "bidirectional": "a bidirectional model",
    "media": "a model of images or audio",
}

_TEMPLATE_RECIPE = "one-word"  # its depth applies to other templates with last-token pooling
_SAMPLE_TEXT = "A few words to see."


def model_kind(source: LayerSource, *, tuned: bool) -> ModelKind:
    """Return the kind of a model; causal attention is detected by running the model.

    Args:
        source: the encoder of the whole model.
        tuned: whether half match indicates an embedding model.
    """
    if "text" not in source.media:
        return "media"
    if tuned:
        return "tuned"
    is_bidirectional = looks_ahead(source.transformer, source.anatomy, source.model_inputs([_SAMPLE_TEXT]))
    return "bidirectional" if is_bidirectional else "causal"


def default_recipe(recipes: Sequence[Recipe], kind: ModelKind) -> Recipe:
    """Return the preferred recipe for a kind of model, or the first if none is in the table.

    Recipes that differ only in what they do to vectors are equal, and the first of them is returned.

    Example:
        >>> from midlayer_encoders.recipes import recipes_of
        >>> default_recipe(recipes_of("recipes", ["plain", "one-word+center"]), "causal").name
        'one-word+center'
        >>> default_recipe(recipes_of("recipes", "all"), "tuned").name
        'plain'
    """
    order = list(DEFAULTS[kind])

    def rank(recipe: Recipe) -> int:
        name = recipe.before_vectors().name
        return order.index(name) if name in order else len(order)

    return min(recipes, key=rank)


def default_depth(recipe: Recipe, kind: ModelKind) -> float:
    """Return the default depth of a recipe.

    Example:
        >>> from midlayer_encoders.recipes import RECIPES
        >>> default_depth(RECIPES["plain"], "causal"), default_depth(RECIPES["one-word"], "tuned")
        (0.8, 1.0)
    """
    depths = DEFAULTS[kind]
    name = recipe.before_vectors().name
    if name not in depths and recipe.template is not None and recipe.pooling == "last":
        name = _TEMPLATE_RECIPE
    return depths.get(name, depths[PLAIN])
