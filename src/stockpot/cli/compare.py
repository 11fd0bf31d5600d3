"""`stockpot compare`: all methods on one pool, the table and the report."""

from __future__ import annotations

from typing import Annotated

import typer

from stockpot.cli.failures import resumable
from stockpot.cli.options import Json, Out, Overrides, Overwrite, RecipeFile, read_recipe, title_of

Growth = Annotated[
    bool,
    typer.Option(
        "--growth", help="Also cook with the first half, quarter and eighth of the ingredients. Takes longer."
    ),
]


@resumable
def compare(
    recipe: RecipeFile,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    out: Out = None,
    growth: Growth = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Cook by every method, on one pool and one set of data, and compare.

    All methods decide before the report data is touched. Called again, it continues where it was; finished
    methods are not repeated. With another recipe or other data it refuses to, and says what differs.

    Methods: best, uniform, greedy, ensemble, learned, learned+, hl, hl+, mehl, mehl+, crossfit.

    Examples:

    ```
    stockpot compare recipe.yaml
    stockpot compare recipe.yaml --set 'method.methods=[best, greedy, crossfit]'
    stockpot compare recipe.yaml --growth --out runs/growth
    stockpot compare recipe.yaml --json > results.json
    ```
    """
    import sys

    from stockpot.cli.drawing import drawing
    from stockpot.cli.ending import end
    from stockpot.run.recipe_job import run_compare

    wanted = read_recipe(recipe, overrides, out)
    with drawing() as listen:
        outcome = run_compare(
            wanted,
            title=title_of(recipe),
            growth=growth,
            overwrite=overwrite,
            command=["stockpot", *sys.argv[1:]],
            listen=listen,
        )
    end(outcome, recipe, as_json, changed=bool(overrides))
