"""Arguments that several commands share, and what they mean to a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stockpot.recipe import Recipe

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe.", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the recipe, such as `method.lr=0.02`. `stockpot schema` lists all keys.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Directory for the results, instead of the recipe's."),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Remove the run that is in that directory, with its results, and start anew."
    ),
]


def title_of(recipe: Path) -> str:
    """The recipe's name; where that says nothing, its folder's."""
    return recipe.absolute().parent.name or recipe.stem if recipe.stem == "recipe" else recipe.stem


def read_recipe(path: Path, overrides: list[str], out: Path | None = None) -> Recipe:
    from stockpot.recipe import load_recipe

    given = list(overrides)
    if out is not None:
        given.append(f"output.dir={json.dumps(str(out.absolute()))}")
    return load_recipe(path, given)
