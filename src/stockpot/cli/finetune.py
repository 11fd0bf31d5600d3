"""`stockpot finetune`: makes the pool."""

from __future__ import annotations

from stockpot.cli.failures import resumable
from stockpot.cli.options import Json, Overrides, RecipeFile


@resumable
def finetune(recipe: RecipeFile, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Make the pool."""
    raise NotImplementedError
