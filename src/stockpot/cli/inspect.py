"""`stockpot inspect`: the pool at a glance, before anything is spent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot.cli.failures import guarded
from stockpot.cli.options import Json, Overrides

if TYPE_CHECKING:
    from stockpot.pool import Pool
    from stockpot.recipe import Recipe

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="POOL...", help="Checkpoints, folders, patterns; or one recipe.", show_default=False
    ),
]
Key = Annotated[
    str | None, typer.Option("--key", metavar="NAME", help="Where the weights are in nested files.")
]
Rename = Annotated[
    list[str], typer.Option("--rename", metavar="OLD=NEW", help="Replace a prefix of tensor names.")
]
Mixed = Annotated[bool, typer.Option("--mixed-dtypes", help="Allow different floating-point types.")]
Budget = Annotated[
    str | None, typer.Option("--budget", metavar="SIZE", help="Memory to plan for, such as 24GB.")
]

_LEAST = 2**20  # bytes of a budget that can be meant


@guarded
def inspect(
    pool: Sources,
    budget: Budget = None,
    key: Key = None,
    rename: Rename = [],  # noqa: B006  (typer copies it)
    mixed_dtypes: Mixed = False,
    overrides: Overrides = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Look at a pool of checkpoints before anything is spent.

    Shows formats, sizes and types, what is frozen, tied or there twice, how far the ingredients are from each
    other, and what each method would need; given a recipe, also whether they fit its model. Reads every
    checkpoint; changes nothing. The exit code is 1 when the pool cannot be used.

    Examples:

    ```
    stockpot inspect checkpoints/
    stockpot inspect 'runs/*/best.pt' --key model --budget 24GB
    stockpot inspect recipe.yaml --json
    ```
    """
    from stockpot.cli.drawing import drawing
    from stockpot.cli.inspected import show
    from stockpot.cli.shell import document
    from stockpot.errors import RunError, describe
    from stockpot.run.survey import against_model, survey
    from stockpot.soup.files import parse_size

    prefixes = {}
    for pair in rename:
        old, equals, new = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"expected OLD=NEW, found {pair!r}", param_hint="--rename")
        prefixes[old] = new
    limit = None if budget is None else parse_size(budget)
    if limit is not None and limit < _LEAST:
        size = f"{limit} byte{'s' * (limit != 1)}"
        raise RunError(
            describe(
                f"--budget {budget}",
                expected="memory of a machine",
                found=size,
                fix="say the unit, as in 24GB",
            )
        )
    recipe = _recipe(pool, overrides)
    with drawing() as listen:
        opened = _open(
            pool,
            recipe,
            {"key": key, "rename": prefixes or None, "mixed_dtypes": mixed_dtypes, "listen": listen},
        )
        nonfinite = "refuse" if recipe is None else recipe.pool.nonfinite
        found = survey(opened, limit, listen, nonfinite=nonfinite)
        if recipe is not None:
            against_model(found, opened, recipe)
    if as_json:
        document(found)
    else:
        show(found)
    if found["problems"]:
        raise typer.Exit(1)


def _recipe(sources: list[str], overrides: list[str]) -> Recipe | None:
    from pathlib import Path

    from stockpot.cli.options import read_recipe

    if len(sources) == 1 and sources[0].endswith((".yaml", ".yml")):
        return read_recipe(Path(sources[0]), overrides)
    if overrides:
        raise typer.BadParameter("there is no recipe to replace values of", param_hint="--set")
    return None


def _open(sources: list[str], recipe: Recipe | None, options: dict[str, Any]) -> Pool:
    from stockpot.pool import Pool

    if recipe is not None:
        paths = recipe.pool.path or ((recipe.finetune.dir,) if recipe.finetune is not None else ())
        sources = [str(recipe.path(path)) for path in paths]
        options["key"] = options["key"] or recipe.pool.key
        options["rename"] = options["rename"] or recipe.pool.rename
        options["mixed_dtypes"] = options["mixed_dtypes"] or recipe.pool.mixed_dtypes
    return Pool.open(sources, **options)
