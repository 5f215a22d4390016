"""Recipes: templates around texts, the tokens to pool, transformations of vectors, and the named recipes.

Import ``counting`` and ``vectors`` from their modules: they need torch, and the command line reads the names only.
"""

from __future__ import annotations

from midlayer_encoders.recipes.recipe import (
    PLAIN,
    RECIPES,
    SMALLEST_SAMPLE,
    Recipe,
    Template,
    has_name,
    recipe_of,
    recipes_of,
)
from midlayer_encoders.recipes.template import (
    TEXT_KINDS,
    TemplateParts,
    TokenLayout,
    add_template,
    check_template,
    split_template,
)

__all__ = [
    "PLAIN",
    "RECIPES",
    "SMALLEST_SAMPLE",
    "TEXT_KINDS",
    "Recipe",
    "Template",
    "TemplateParts",
    "TokenLayout",
    "add_template",
    "check_template",
    "has_name",
    "recipe_of",
    "recipes_of",
    "split_template",
]
