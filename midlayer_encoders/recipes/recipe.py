"""``Recipe``: how a text is put to a model and what becomes of its states; the named recipes, with their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from midlayer_encoders._types import NORMS, POOLINGS, Layer, Norm, Pooling
from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.recipes.template import check_template
from midlayer_encoders.validation import check_choice, check_count, check_flag, check_text

__all__ = ["PLAIN", "RECIPES", "SMALLEST_SAMPLE", "Recipe", "Template", "has_name", "recipe_of", "recipes_of"]

Template: TypeAlias = str | Mapping[str, str]
"""``'Before {text} after'``, or one for each of ``"query"``, ``"document"`` and ``"text"`` (whatever is neither)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a text becomes a vector, before and after the model.

    Attributes:
        name: in frames, on pages and in commands.
        template: what stands around the text, with ``{text}`` in its place, once or (the text is then repeated) twice.
        layer: or layers, for an encoder that is made without naming one; a sweep or a selection looks at them all.
        norm: ``None`` leaves that to whoever uses the recipe.
        pooling: ``None`` likewise; under a template that ends in a question it is ``"last"``.
        skip_first: tokens at the beginning that no mean counts: causal models put outsized states there.
        template_tokens: whether a mean counts the tokens of the template too. Of a text that stands there twice, the
            second copy is pooled when it does not.
        center: subtract the mean vector of texts like those to come.
        whiten: after that, scale every direction by its spread over those texts, shrunk toward equal scales.
        embed_filter: keep the middle singular directions of the model's output embeddings alone.
        normalize: scale every vector to length 1.
        source: where the recipe is from.
    """

    name: str
    template: Template | None = field(default=None, hash=False)  # a mapping has no hash
    layer: Layer | Sequence[Layer] | None = None
    norm: Norm | None = None
    pooling: Pooling | None = None
    skip_first: int = 0
    template_tokens: bool = True
    center: bool = False
    whiten: bool = False
    embed_filter: bool = False
    normalize: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if not check_text("name", self.name).strip():
            raise OptionError("`name` must hold a word: it stands in frames, on pages and in commands.")
        if self.template is not None:
            # A copy: what the caller does to a mapping later is not checked.
            object.__setattr__(self, "template", check_template("template", self.template))
        if isinstance(self.layer, Sequence):
            object.__setattr__(self, "layer", tuple(self.layer))  # a list has no hash
        if self.norm is not None:
            check_choice("norm", self.norm, NORMS)
        if self.pooling is not None:
            check_choice("pooling", self.pooling, POOLINGS)
        check_count("skip_first", self.skip_first, minimum=0)
        for name in ("template_tokens", "center", "whiten", "embed_filter", "normalize"):
            check_flag(name, getattr(self, name))
        if self.whiten and not self.center:
            raise OptionError("`whiten` must be False without `center`: directions are scaled around the mean.")

    @property
    def changes_vectors(self) -> bool:
        """Whether anything is done to pooled vectors."""
        return self.center or self.embed_filter or self.normalize

    def before_vectors(self) -> Recipe:
        """Return this recipe without what it does to pooled vectors, and without its layer."""
        words = [word for word in self.name.split("+") if word not in ("center", "whiten", "filter", "normalize")]
        return replace(
            self, name="+".join(words), layer=None, center=False, whiten=False, embed_filter=False, normalize=False
        )

    def changed(self) -> dict[str, Any]:
        """Return what differs from the plain text, by name."""
        aside = ("name", "source")
        return {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in aside and getattr(self, one.name) != one.default
        }


PLAIN = "plain"
SMALLEST_SAMPLE = 16
"""Texts to center on: the mean of fewer is one of them as much as what all share."""

_ALL = (
    Recipe(name=PLAIN, source="the text itself, with the encoder's own pooling"),
    Recipe(
        name="one-word",
        template='This sentence : "{text}" means in one word:"',
        pooling="last",
        source="PromptEOL: Jiang et al., 'Scaling Sentence Embeddings with Large Language Models', 2023",
    ),
    Recipe(
        name="summarize",
        template='Summarize the sentence "{text}" in one word:"',
        pooling="last",
        source="after MetaEOL: Lei et al., 'Meta-Task Prompting Elicits Embeddings from LLMs', 2024",
    ),
    Recipe(
        name="echo",
        template='Rewrite the sentence "{text}". The rewritten sentence: "{text}"',
        pooling="mean",
        template_tokens=False,
        source="Springer et al., 'Repetition Improves Language Model Embeddings', 2024",
    ),
    Recipe(
        name="instruction",
        template={
            "text": "Instruct: Retrieve semantically similar text.\nQuery: {text}",
            "query": "Instruct: Given a search query, retrieve relevant passages that answer the query.\nQuery: {text}",
            "document": "{text}",
        },
        pooling="last",
        source="Wang et al., 'Improving Text Embeddings with Large Language Models', 2024; for models tuned that way",
    ),
)
RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""The named recipes.

Token prepending (Fu et al., 2024) is not among them: it changes the states between blocks, which no plain folder does.
"""


_ADDED: Mapping[str, Mapping[str, Any]] = {
    "center": {"center": True},
    "whiten": {"center": True, "whiten": True},
    "filter": {"embed_filter": True},
    "normalize": {"normalize": True},
    "skip-first": {"skip_first": 1},
    "mean": {"pooling": "mean"},
    "last": {"pooling": "last"},
}
"""What may be added to the name of a recipe, after a plus sign."""


def recipe_of(argument: str, value: Any) -> Recipe:
    """Return a recipe as it is, or the one of this name, to which ``+center`` and the like may be added.

    Example:
        >>> recipe_of("recipe", "one-word").pooling
        'last'
        >>> recipe_of("recipe", "plain+skip-first+filter").changed()
        {'skip_first': 1, 'embed_filter': True}
    """
    if isinstance(value, Recipe):
        return value
    name, *added = value.split("+") if isinstance(value, str) else ("",)
    unknown = next((word for word in added if word not in _ADDED), None)
    if name not in RECIPES or unknown is not None:
        near = did_you_mean(name, RECIPES) if unknown is None else did_you_mean(unknown, _ADDED)
        raise OptionError(
            f"`{argument}` must be a Recipe or one of {', '.join(map(repr, RECIPES))}, to which "
            f"{', '.join('+' + word for word in _ADDED)} may be added, but got {value!r}.{near}"
        )
    fields_of: dict[str, Any] = {}
    for word in added:
        fields_of |= _ADDED[word]
    return replace(RECIPES[name], **fields_of, name=value) if added else RECIPES[name]


def has_name(recipe: Recipe) -> bool:
    """Return whether a recipe's name alone makes it."""
    try:
        return recipe_of("recipe", recipe.name) == recipe
    except OptionError:
        return False


def recipes_of(argument: str, values: Any) -> list[Recipe]:
    """Return several recipes, from their names, ``"all"``, or as they are; no two of one name."""
    if values == "all":
        return list(_ALL)
    given: Sequence[Any] = values if isinstance(values, list | tuple) else [values]
    found = [recipe_of(argument, value) for value in given]
    if not found:
        raise OptionError(f"`{argument}` must name a recipe, but got none. Write {argument}=['plain', 'one-word'].")
    names = [recipe.name for recipe in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"`{argument}` must be recipes of different names, but got {min(twice)!r} twice.")
    return found
