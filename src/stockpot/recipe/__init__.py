"""The YAML recipe: what a run is made of, checked before anything is spent."""

from stockpot.recipe.load import load_recipe, make_recipe, plain_yaml
from stockpot.recipe.schema import Recipe, json_schema

__all__ = ["Recipe", "json_schema", "load_recipe", "make_recipe", "plain_yaml"]
