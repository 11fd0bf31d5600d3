"""What a recipe may say: one file per section. Nothing here loads torch."""

from stockpot.recipe.schema.data import Data, Preprocessing
from stockpot.recipe.schema.finetune import Finetune
from stockpot.recipe.schema.method import Method
from stockpot.recipe.schema.model import Model
from stockpot.recipe.schema.output import Output
from stockpot.recipe.schema.pool import PoolSection
from stockpot.recipe.schema.recipe import Recipe
from stockpot.recipe.schema.space import Space
from stockpot.recipe.schema.split import Split

__all__ = [
    "Data",
    "Finetune",
    "Method",
    "Model",
    "Output",
    "PoolSection",
    "Preprocessing",
    "Recipe",
    "Space",
    "Split",
]
