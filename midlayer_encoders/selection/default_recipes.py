"""Which recipe, and how deep, without labels: one table by the kind of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from midlayer_encoders.reading.causal import looks_ahead
from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.recipes import PLAIN, Recipe
from midlayer_encoders.selection.rules import DEPTH

__all__ = ["DEFAULTS", "EVIDENCE", "MODEL_KINDS", "ModelKind", "default_depth", "default_recipe", "model_kind"]

ModelKind: TypeAlias = Literal["tuned", "causal", "bidirectional", "media"]
"""Tuned so that its last layer compares texts; else by what a token sees; or a model of images or audio."""

MODEL_KINDS: tuple[ModelKind, ...] = get_args(ModelKind)

DEFAULTS: Mapping[ModelKind, Mapping[str, float]] = {
    "tuned": {PLAIN: 1.0},
    "causal": {"one-word": 0.95, "summarize": 0.95, "echo": 0.95, PLAIN: DEPTH},
    "bidirectional": {PLAIN: DEPTH},
    "media": {PLAIN: DEPTH},
}
"""Recipes in the order of preference, and the depth of each, for every kind; benchmarks/selection/README.md."""

EVIDENCE: Mapping[ModelKind, str] = {
    "tuned": "of a model whose last layer seems made for comparing texts",
    "causal": "of a causal model that was not tuned for embeddings",
    "bidirectional": "of a model whose tokens see each other",
    "media": "of a model of images or audio",
}
"""Whose default it is, in words."""

_ASKED = "one-word"  # whose depth other templates that end in a question are given
_PROBE = "A few words to see."


def model_kind(source: LayerSource, *, tuned: bool) -> ModelKind:
    """Return the kind of a model; whether a token sees those after it is tried, not looked up.

    Args:
        source: the encoder of the whole model.
        tuned: whether half match says that its last layer was made for comparing texts.
    """
    if "text" not in source.media:
        return "media"
    if tuned:
        return "tuned"
    ahead = looks_ahead(source.transformer, source.anatomy, source.model_inputs([_PROBE]))
    return "bidirectional" if ahead else "causal"


def default_recipe(recipes: Sequence[Recipe], kind: ModelKind) -> Recipe:
    """Return the recipe that a model of this kind is asked by without labels, of those at hand; else the first.

    What is done to vectors counts only where nothing else tells recipes apart: the first of equal ones is taken.

    Example:
        >>> from midlayer_encoders.recipes import recipes_of
        >>> default_recipe(recipes_of("recipes", ["plain", "one-word+center"]), "causal").name
        'one-word+center'
        >>> default_recipe(recipes_of("recipes", "all"), "tuned").name
        'plain'
    """
    order = list(DEFAULTS[kind])

    def place(recipe: Recipe) -> int:
        name = recipe.before_vectors().name
        return order.index(name) if name in order else len(order)

    return min(recipes, key=place)


def default_depth(recipe: Recipe, kind: ModelKind) -> float:
    """Return how deep a recipe is read without labels.

    Example:
        >>> from midlayer_encoders.recipes import RECIPES
        >>> default_depth(RECIPES["plain"], "causal"), default_depth(RECIPES["one-word"], "tuned")
        (0.8, 1.0)
    """
    known = DEFAULTS[kind]
    name = recipe.before_vectors().name
    if name in known:
        return known[name]
    return known.get(_ASKED if recipe.template is not None and recipe.pooling == "last" else PLAIN, known[PLAIN])
