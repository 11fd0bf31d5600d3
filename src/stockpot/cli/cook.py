"""`stockpot cook`: one method, one soup."""

from __future__ import annotations

from stockpot.cli.failures import resumable
from stockpot.cli.options import Json, Out, Overrides, Overwrite, RecipeFile, read_recipe, title_of


@resumable
def cook(
    recipe: RecipeFile,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Cook one soup by the recipe's method.

    The method is `method.name`: crossfit (the default), best, uniform, greedy, learned, learned+, hl, hl+, mehl,
    mehl+. Called again after an interruption, it continues where it was.

    Examples:

    ```
    stockpot cook recipe.yaml
    stockpot cook recipe.yaml --set method.name=greedy --out runs/greedy
    stockpot cook recipe.yaml --set method.preset=paper --set method.name=mehl+
    ```
    """
    import sys

    from stockpot.cli.drawing import drawing
    from stockpot.cli.ending import end
    from stockpot.run.recipe_job import run_cook

    wanted = read_recipe(recipe, overrides, out)
    with drawing() as listen:
        outcome = run_cook(
            wanted,
            title=title_of(recipe),
            overwrite=overwrite,
            command=["stockpot", *sys.argv[1:]],
            listen=listen,
        )
    end(outcome, recipe, as_json, changed=bool(overrides))
