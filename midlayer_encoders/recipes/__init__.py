"""How a text is put to a model: templates, which tokens count, what is done to vectors, and the named recipes."""

from __future__ import annotations

from midlayer_encoders.recipes.counting import Counting
from midlayer_encoders.recipes.recipe import PLAIN, RECIPES, Recipe, Template, has_name, recipe_of, recipes_of
from midlayer_encoders.recipes.template import KINDS, Frame, Placed, check_template, frames_of, with_frame
from midlayer_encoders.recipes.vectors import SMALLEST_SAMPLE, middle_directions, vector_map

__all__ = [
    "KINDS",
    "PLAIN",
    "RECIPES",
    "SMALLEST_SAMPLE",
    "Counting",
    "Frame",
    "Placed",
    "Recipe",
    "Template",
    "check_template",
    "frames_of",
    "has_name",
    "middle_directions",
    "recipe_of",
    "recipes_of",
    "vector_map",
    "with_frame",
]
