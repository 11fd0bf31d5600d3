"""`stockpot inspect`: the pool at a glance, before anything is spent."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot import words
from stockpot.cli.adapters import describe_adapters, show_adapters, without_refused
from stockpot.cli.scaled import describe_scaled, show_scaled
from stockpot.cli.terminal import Json, Overrides, document, read_recipe, say, table
from stockpot.errors import LayoutError, PoolError, RunError, StockpotError, describe
from stockpot.events import Listener, ignore
from stockpot.progress import drawing

if TYPE_CHECKING:
    from torch import nn

    from stockpot.layout import Layout
    from stockpot.pool import Pool
    from stockpot.recipe import Recipe

Sources = Annotated[
    list[str],
    typer.Argument(metavar="POOL...", help="Checkpoints, folders, patterns; or one recipe.", show_default=False),
]
Key = Annotated[str | None, typer.Option("--key", metavar="NAME", help="Where the weights are in nested files.")]
Rename = Annotated[list[str], typer.Option("--rename", metavar="OLD=NEW", help="Replace a prefix of tensor names.")]
Mixed = Annotated[bool, typer.Option("--mixed-dtypes", help="Allow different floating-point types.")]
Base = Annotated[str | None, typer.Option("--base", metavar="MODEL", help="The model that LoRA adapters are on.")]
Budget = Annotated[
    str | None,
    typer.Option("--budget", "--memory", metavar="SIZE", help="Memory of one device to plan for, such as 24GB."),
]
Ranks = Annotated[
    int | None, typer.Option("--ranks", min=1, metavar="N", help="Forecast for so many GPUs, of a recipe's method.")
]
Bandwidth = Annotated[
    str | None, typer.Option("--bandwidth", metavar="SIZE", help="Bytes a second between those GPUs, such as 25GB.")
]


def inspect(
    pool: Sources,
    budget: Budget = None,
    key: Key = None,
    rename: Rename = [],  # noqa: B006  (typer copies it)
    mixed_dtypes: Mixed = False,
    base: Base = None,
    overrides: Overrides = [],  # noqa: B006
    ranks: Ranks = None,
    bandwidth: Bandwidth = None,
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
    stockpot inspect recipe.yaml --ranks 64 --memory 80GB      # on 64 GPUs: arrangement, memory, time of a step
    ```
    """
    from stockpot.pool import Pool
    from stockpot.recipe.build import pool_base, pool_paths

    prefixes = prefixes_of(rename)
    limit = None if budget is None else _bytes(budget)
    recipe = None
    if len(pool) == 1 and pool[0].endswith((".yaml", ".yml")):
        recipe = read_recipe(Path(pool[0]), overrides)
        section, pool = recipe.pool, pool_paths(recipe)
        key, prefixes = key or section.key, prefixes or section.rename
        mixed_dtypes, base = mixed_dtypes or section.mixed_dtypes, base or pool_base(recipe)
    elif overrides:
        raise typer.BadParameter("there is no recipe to replace values of", param_hint="--set")
    if ranks is not None and (recipe is None or limit is None):
        missing = "a recipe" if recipe is None else "the memory of one GPU: --memory 80GB"
        raise typer.BadParameter(f"needs {missing}", param_hint="--ranks")
    speed = None if bandwidth is None else _bytes(bandwidth, "--bandwidth")
    options: dict[str, Any] = {"key": key, "rename": prefixes, "mixed_dtypes": mixed_dtypes, "base": base}
    with drawing() as listen:
        try:
            opened, refused = Pool.open(pool, listen=listen, **options), list[str]()
        except PoolError as error:
            opened, refused = without_refused(pool, options, error)
        nonfinite = "refuse" if recipe is None else recipe.pool.nonfinite
        found = survey(opened, limit, listen, nonfinite=nonfinite)
        found["problems"] += refused
        if recipe is not None:
            _check_model(found, opened, recipe)
            if ranks is not None and limit is not None and not found["problems"]:
                found["scaled"] = describe_scaled(recipe, opened, ranks, limit, speed)
    if as_json:
        document(found)
    else:
        _show(found)
    if found["problems"]:
        raise typer.Exit(1)


def prefixes_of(pairs: Sequence[str]) -> dict[str, str] | None:
    for pair in pairs:
        if "=" not in pair:
            raise typer.BadParameter(f"expected OLD=NEW, found {pair!r}", param_hint="--rename")
    return dict(pair.split("=", 1) for pair in pairs) or None


def _bytes(budget: str, option: str = "--budget") -> int:
    from stockpot.recipe.values import parse_bytes

    try:
        found = parse_bytes(budget)
    except ValueError as error:
        raise RunError(f"{option}: {error}.\n  Fix: say the unit, as in 24GB.") from error
    if found < 2**20:  # nobody means less
        size, fix = words.plural(found, "byte"), "say the unit, as in 24GB"
        raise RunError.of(f"{option} {budget}", expected="memory of a machine", found=size, fix=fix)
    return found


def survey(
    pool: Pool, budget: int | None = None, listen: Listener = ignore, *, nonfinite: str = "refuse"
) -> dict[str, Any]:
    """Everything worth knowing about a pool before it is cooked, as plain values.

    `nonfinite`: what is done with checkpoints that are not finite, as in a recipe's pool section.
    """
    from stockpot.layout import Layout
    from stockpot.recipe.build import finite
    from stockpot.run.record import describe_pool

    problems: list[str] = []
    try:
        pool = finite(pool, nonfinite, listen)
    except PoolError as error:
        problems.append(str(error))
    facts = pool.facts(listen)
    found = describe_pool(pool, facts)
    lengths = zip(found.pop("to_mean"), found.pop("norms"), strict=True)
    for entry, checkpoint, (distance, norm) in zip(found["ingredients"], pool.checkpoints, lengths, strict=True):
        del entry["fit"]
        entry.update(key=checkpoint.key, to_mean=distance, norm=norm)
    if pool.adapters is not None:
        describe_adapters(pool.adapters, found)
    outlier = found["outlier"]
    found.update(
        outlier=None if outlier is None else pool.names[outlier],
        strangers=[pool.names[k] for k in facts.distances.strangers()],
        duplicates=[[pool.names[k] for k in group] for group in facts.duplicates],
        near=[
            [pool.names[i], pool.names[j]]
            for i, j in facts.distances.near()
            if not any(i in group and j in group for group in facts.duplicates)
        ],
        dropped=list(pool.dropped),
        problems=problems,
        forecast=None,
    )
    try:
        layout = Layout.of(pool, "model", facts=facts)
    except LayoutError as error:
        problems.append(str(error))
    else:
        found["kept"] = dict(Counter(layout.kept.values()))
        found["forecast"] = _forecast(pool, layout, budget)
    return found


def _forecast(pool: Pool, layout: Layout, budget: int | None) -> dict[str, Any]:
    from stockpot.soups.forecast import NOT_INCLUDED, Size, forecasts, largest_block
    from stockpot.soups.registry import METHODS

    size = Size.of(pool, layout)
    blockwise = [name for name, method in METHODS.items() if method.blockwise]
    return {
        "budget": budget,
        "device": "cuda" if size.gpu else "cpu",
        "mixed_parameters": size.parameters,
        "not_included": NOT_INCLUDED,
        "rows": [dataclasses.asdict(row) for row in forecasts(size, budget)],
        "largest_block": budget and {name: largest_block(size, budget) for name in blockwise},
    }


def _check_model(found: dict[str, Any], pool: Pool, recipe: Recipe) -> None:
    """Whether the pool's tensors are those of the recipe's model, into `found`."""
    from stockpot.names import differences

    model = _architecture(recipe)
    differing = differences(model, pool.specs, spare=pool.spare)
    found["model"] = {
        "name": type(model).__name__,
        "fits": not differing,
        "not_in_model": list(differing.lacks),
        "not_in_pool": list(differing.extra),
        "shapes": list(differing.shapes),
        "rename": differing.rename,
    }
    if differing:
        what, same = f"the pool and the recipe's model ({type(model).__name__})", f"the same {len(pool.specs)} tensors"
        said = describe(what, expected=same, found=";\n  ".join(differing.sentences()), fix=differing.fix())
        found["problems"].append(said)


def _architecture(recipe: Recipe) -> nn.Module:
    """The model, without memory for its weights where its library can do without."""
    import torch

    from stockpot.recipe.build import build_model

    if recipe.model.kind != "python":
        try:
            with torch.device("meta"):
                return build_model(recipe).model
        except Exception as error:  # a constructor that looks at its own weights, unless we know better
            if isinstance(error, StockpotError):
                raise
    return build_model(recipe).model


def _show(found: Mapping[str, Any]) -> None:
    ingredients, model, forecast = found["ingredients"], found.get("model"), found["forecast"]
    dtypes = ", ".join(f"{count} {name}" for name, count in found["dtypes"].items())
    say(
        f"{words.plural(len(ingredients), 'ingredient')} of {words.count(found['parameters'])} parameters"
        f" in {words.plural(found['tensors'], 'tensor')} ({dtypes});"
        f" {words.size(sum(entry['bytes'] for entry in ingredients))} in all\n"
    )
    if model is not None:
        fits = "fits the recipe's model" if model["fits"] else "does not fit the recipe's model; see the end"
        say(f"The pool {fits} ({model['name']}).\n")
    if found["base"] is not None:
        show_adapters(found)
    else:
        headings = ("ingredient", "format", "size", "norm", "distance to mean", "nearest")
        table(headings, [_ingredient(k, found) for k in range(len(ingredients))])
    peculiar = _peculiarities(found)
    say("\n".join(["", *peculiar, ""] if peculiar else [""]))
    if forecast is not None:
        _show_forecast(forecast, len(ingredients))
    if found.get("scaled") is not None:
        show_scaled(found["scaled"])
    for problem in found["problems"]:
        say(f"problem: {problem}\n")


def _ingredient(k: int, found: Mapping[str, Any]) -> tuple[str, ...]:
    entry = found["ingredients"][k]
    others = [(d, i) for i, d in enumerate(found["distances"][k]) if i != k and d is not None]
    distance, i = min(others, default=(None, k))
    nearest = f"{words.middle(found['ingredients'][i]['name'], 24)} ({_distance(distance)})" if others else "–"
    return (
        entry["name"],
        entry["format"] + (f" [{entry['key']}]" if entry["key"] else ""),
        words.size(entry["bytes"]),
        _distance(entry["norm"]),
        _distance(entry["to_mean"]),
        nearest,
    )


def _distance(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _peculiarities(found: Mapping[str, Any]) -> list[str]:
    def some(names: Sequence[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    kept = found.get("kept", {})
    far = any(entry["to_mean"] is not None for entry in found["ingredients"])
    why = "much farther from the mean than the others" if far else "not finite, and so nothing is near the mean"
    statistics = words.plural(kept.get("statistic", 0), "running statistic")
    lines = {
        f"left out: {some(found['dropped'])}, not finite, as the recipe says (pool.nonfinite: drop)": found["dropped"],
        f"outlier: {found['outlier']} is {why}": found["outlier"] is not None,
        f"no kin: {some(found['strangers'])}, farther from every other ingredient than from zero;"
        " not a fine-tune of the same model?": found["strangers"],
        f"frozen: {some(found['frozen'])} equal in all ingredients; copied, not mixed": found["frozen"],
        **{f"tied: {some(names)} hold one tensor; mixed once": True for names in found["tied"]},
        **{f"duplicates: {some(names)} have the same content": True for names in found["duplicates"]},
        **{f"nearly the same: {a} and {b}; what they have in common counts twice": True for a, b in found["near"][:8]},
        f"nearly the same: {len(found['near']) - 8} more pairs": len(found["near"]) > 8,
        f"statistics: {statistics} of normalisation layers; measured again for every soup": kept.get("statistic"),
        f"integers: {words.plural(kept.get('integer', 0), 'tensor')}; never averaged": kept.get("integer"),
    }
    return [line for line, there in lines.items() if there]


def _show_forecast(forecast: Mapping[str, Any], models: int) -> None:
    budget = [] if forecast["budget"] is None else ["fits the budget"]
    rows = []
    for row in forecast["rows"]:
        block = f"all {models}" if row["block"] == models else str(row["block"] or 1)
        fits = ["yes" if row["fits"] else "no"] if budget else []
        rows.append([row["method"], block, words.size(row["memory"]), words.size(row["reading"]), *fits])
    table(["method", "models at a time", "peak memory", "reading", *budget], rows)
    where = "on the GPU, directions in bf16" if forecast["device"] == "cuda" else "on the CPU, weights in fp32"
    say(f"\nPeak memory is {where}; not included: {forecast['not_included']}.")
    if budget:
        block = forecast["largest_block"]["crossfit"]
        largest = f"Largest block for crossfit within the budget: {block} (method.block_size: {block})."
        say(largest if block else "No block size of crossfit fits this budget; uniform and greedy need the least.")
    say()
