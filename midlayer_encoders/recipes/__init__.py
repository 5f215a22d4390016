"""How a text is put to a model: templates, which tokens count, what is done to vectors, and the named recipes.

What needs torch (``counting``, ``vectors``) is imported from its own module: the command line reads the names alone.
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
from midlayer_encoders.recipes.template import TEXT_KINDS, Frame, Placed, check_template, frames_of, with_frame

__all__ = [
    "PLAIN",
    "RECIPES",
    "SMALLEST_SAMPLE",
    "TEXT_KINDS",
    "Frame",
    "Placed",
    "Recipe",
    "Template",
    "check_template",
    "frames_of",
    "has_name",
    "recipe_of",
    "recipes_of",
    "with_frame",
]
