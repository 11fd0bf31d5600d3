"""The YAML recipe: what a run is made of, checked before anything is spent."""

from stockpot.recipe.load import load_recipe, make_recipe
from stockpot.recipe.reference import json_schema, recipe_reference
from stockpot.recipe.schema import Recipe

__all__ = ["Recipe", "json_schema", "load_recipe", "make_recipe", "recipe_reference"]
