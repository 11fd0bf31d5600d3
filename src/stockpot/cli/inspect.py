"""`stockpot inspect`: the pool at a glance, before anything is spent."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot.cli.failures import guarded
from stockpot.cli.options import Json, Overrides, read_recipe
from stockpot.cli.pool_text import show
from stockpot.cli.progress import drawing
from stockpot.cli.terminal import document
from stockpot.errors import LayoutError, PoolError, RunError, StockpotError, describe
from stockpot.events import Listener, ignore

if TYPE_CHECKING:
    from torch import nn

    from stockpot.layout import Layout
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
    from stockpot.soup.build import parse_size

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
            _against_model(found, opened, recipe)
    if as_json:
        document(found)
    else:
        show(found)
    if found["problems"]:
        raise typer.Exit(1)


def _recipe(sources: list[str], overrides: list[str]) -> Recipe | None:
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


def survey(
    pool: Pool, budget: int | None = None, listen: Listener = ignore, *, nonfinite: str = "refuse"
) -> dict[str, Any]:
    """Everything worth knowing about a pool before it is cooked, as plain values.

    `nonfinite`: what is done with checkpoints that are not finite, as in a recipe's pool section.
    """
    from stockpot.layout import Layout
    from stockpot.run.ingredients import count_parameters, trial_settings

    problems: list[str] = []
    try:
        if nonfinite == "drop":
            pool = pool.drop_nonfinite(listen)
        elif nonfinite == "refuse":
            pool.verify_finite(listen)
    except PoolError as error:
        problems.append(str(error))
    facts = pool.facts(listen)
    found: dict[str, Any] = {
        "ingredients": [
            {
                "name": name,
                "path": str(checkpoint.path),
                "format": checkpoint.format,
                "key": checkpoint.key,
                "bytes": checkpoint.nbytes,
                "digest": digest,
                "to_mean": None,
                "norm": None,
                "trial": trial_settings(checkpoint.path),
            }
            for name, checkpoint, digest in zip(pool.names, pool.checkpoints, facts.digests, strict=True)
        ],
        "parameters": count_parameters(pool, facts),
        "tensors": len(pool.specs),
        "dtypes": dict(
            Counter(str(spec.dtype).removeprefix("torch.") for spec in pool.specs.values()).most_common()
        ),
        "frozen": sorted(facts.frozen),
        "tied": [list(names) for names in facts.tied],
        "dropped": list(pool.dropped),
        "duplicates": [[pool.names[k] for k in group] for group in facts.duplicates],
        "distances": None,
        "outlier": None,
        "strangers": [],
        "problems": problems,
        "forecast": None,
    }
    try:
        layout = Layout.of(pool, "model", facts=facts)
    except LayoutError as error:
        problems.append(str(error))
        return found
    found["kept"] = dict(Counter(layout.kept.values()))
    measured = facts.distances
    found["distances"] = [[_finite(d) for d in row] for row in measured.pairs.tolist()]
    lengths = zip(measured.to_mean.tolist(), measured.norms.tolist(), strict=True)
    for entry, (distance, norm) in zip(found["ingredients"], lengths, strict=True):
        entry["to_mean"], entry["norm"] = _finite(distance), _finite(norm)
    outlier = measured.outlier()
    found["outlier"] = None if outlier is None else pool.names[outlier]
    found["strangers"] = [pool.names[k] for k in measured.strangers()]
    found["forecast"] = _forecast(pool, layout, budget)
    return found


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def _against_model(found: dict[str, Any], pool: Pool, recipe: Recipe) -> None:
    """Whether the pool's tensors are those of the recipe's model, into `found`."""
    from stockpot.task.checks import differences

    model = _architecture(recipe)
    differing = differences(model, pool.specs)
    found["model"] = {
        "name": type(model).__name__,
        "fits": not differing,
        "not_in_model": list(differing.lacks),
        "not_in_pool": list(differing.extra),
        "shapes": list(differing.shapes),
        "rename": differing.rename,
    }
    if differing:
        found["problems"].append(
            describe(
                f"the pool and the recipe's model ({type(model).__name__})",
                expected=f"the same {len(pool.specs)} tensors",
                found=";\n  ".join(differing.sentences()),
                fix=differing.fix(),
            )
        )


def _architecture(recipe: Recipe) -> nn.Module:
    """The model, without memory for its weights where its library can do without."""
    import torch

    from stockpot.recipe.build import build_model

    if recipe.model.kind != "python":
        try:
            with torch.device("meta"):
                return build_model(recipe).model
        except StockpotError:
            raise
        except Exception:  # a constructor that looks at its own weights
            pass
    return build_model(recipe).model


def _forecast(pool: Pool, layout: Layout, budget: int | None) -> dict[str, Any]:
    from stockpot.soups.forecast import NOT_INCLUDED, Size, forecasts, largest_block

    size = Size.of(pool, layout)
    blockwise = ("mehl", "mehl+", "crossfit")
    return {
        "budget": budget,
        "device": "cuda" if size.gpu else "cpu",
        "mixed_parameters": size.parameters,
        "not_included": NOT_INCLUDED,
        "rows": [dataclasses.asdict(row) for row in forecasts(size, budget)],
        "largest_block": None
        if budget is None
        else {name: largest_block(size, name, budget) for name in blockwise},
    }
