"""``Recipe``: how a text becomes a vector; and the named recipes with their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from midlayer_encoders._types import NORMS, POOLINGS, Layer, Norm, Pooling
from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.recipes.template import check_template
from midlayer_encoders.validation import check_choice, check_count, check_flag, check_text

Template: TypeAlias = str | Mapping[str, str]
"""``'Before {text} after'``, or one for each of ``"query"``, ``"document"`` and ``"text"`` (whatever is neither)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a text becomes a vector, before and after the model.

    Attributes:
        name: name in frames, on pages and in commands.
        template: text with ``{text}`` once, or twice to repeat the text.
        layer: layer or layers of an encoder that names none; a sweep or a selection reads all layers.
        norm: ``None`` leaves the encoder's.
        pooling: ``None`` leaves the encoder's; a template that ends in a question needs ``"last"``.
        skip_first: number of tokens at the start that are not pooled: causal models have massive activations there.
        template_tokens: whether to pool the tokens of the template, too. Otherwise the text is pooled, and of a
            repeated text the second copy.
        center: subtract the mean vector of sample texts.
        whiten: then scale every direction by its spread over these texts, shrunk toward equal scales.
        embed_filter: keep only the middle singular directions of the model's output embeddings.
        normalize: scale every vector to length 1.
        source: where the recipe comes from.
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
            raise OptionError("`name` must not be blank: it appears in frames, on pages and in commands.")
        if self.template is not None:
            # A copy, because a mapping may change later.
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
            raise OptionError("`whiten` must be False without `center`, because it scales directions around the mean.")

    @property
    def changes_vectors(self) -> bool:
        """Whether the recipe transforms pooled vectors."""
        return self.center or self.embed_filter or self.normalize

    def before_vectors(self) -> Recipe:
        """Return this recipe without its layer and its transformations of pooled vectors."""
        parts = [part for part in self.name.split("+") if part not in ("center", "whiten", "filter", "normalize")]
        return replace(
            self, name="+".join(parts), layer=None, center=False, whiten=False, embed_filter=False, normalize=False
        )

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("name", "source") and getattr(self, item.name) != item.default
        }


PLAIN = "plain"
SMALLEST_SAMPLE = 16
"""Minimum number of texts to center on."""

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

Token prepending (Fu et al., 2024) is not included: it changes states between blocks, which no plain folder can do.
"""


_SUFFIXES: Mapping[str, Mapping[str, Any]] = {
    "center": {"center": True},
    "whiten": {"center": True, "whiten": True},
    "filter": {"embed_filter": True},
    "normalize": {"normalize": True},
    "skip-first": {"skip_first": 1},
    "mean": {"pooling": "mean"},
    "last": {"pooling": "last"},
}
"""Suffixes of a recipe's name, after a plus sign."""


def recipe_of(argument: str, value: Any) -> Recipe:
    """Return a recipe from its name, with optional suffixes such as ``+center``, or return a :class:`Recipe`.

    Example:
        >>> recipe_of("recipe", "one-word").pooling
        'last'
        >>> recipe_of("recipe", "plain+skip-first+filter").changed()
        {'skip_first': 1, 'embed_filter': True}
    """
    if isinstance(value, Recipe):
        return value
    name, *suffixes = value.split("+") if isinstance(value, str) else ("",)
    unknown = next((suffix for suffix in suffixes if suffix not in _SUFFIXES), None)
    if name not in RECIPES or unknown is not None:
        near = did_you_mean(name, RECIPES) if unknown is None else did_you_mean(unknown, _SUFFIXES)
        raise OptionError(
            f"`{argument}` must be a Recipe or one of {', '.join(map(repr, RECIPES))}, with optional "
            f"{', '.join('+' + suffix for suffix in _SUFFIXES)}, but got {value!r}.{near}"
        )
    changes: dict[str, Any] = {}
    for suffix in suffixes:
        changes |= _SUFFIXES[suffix]
    return replace(RECIPES[name], **changes, name=value) if suffixes else RECIPES[name]


def has_name(recipe: Recipe) -> bool:
    """Return True if the recipe's name alone defines it."""
    try:
        return recipe_of("recipe", recipe.name) == recipe
    except OptionError:
        return False


def recipes_of(argument: str, values: Any) -> list[Recipe]:
    """Return several recipes from names, :class:`Recipe` objects or ``"all"``; their names must differ."""
    if values == "all":
        return list(_ALL)
    recipes = [recipe_of(argument, value) for value in (values if isinstance(values, list | tuple) else [values])]
    if not recipes:
        raise OptionError(f"`{argument}` must name a recipe, but got none. Write {argument}=['plain', 'one-word'].")
    names = [recipe.name for recipe in recipes]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise OptionError(f"`{argument}` must be recipes of different names, but got {min(repeated)!r} twice.")
    return recipes
