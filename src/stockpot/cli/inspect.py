"""`stockpot inspect`: the pool at a glance, before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot import words
from stockpot.cli.survey import check_model, describe_scaled, survey, without_refused
from stockpot.cli.terminal import Json, Overrides, document, read_recipe, say, shown, table
from stockpot.errors import PoolError, RunError
from stockpot.progress import drawing

if TYPE_CHECKING:
    pass

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
            check_model(found, opened, recipe)
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
        _show_adapters(found)
    else:
        headings = ("ingredient", "format", "size", "norm", "distance to mean", "nearest")
        table(headings, [_ingredient(k, found) for k in range(len(ingredients))])
    peculiar = _peculiarities(found)
    say("\n".join(["", *peculiar, ""] if peculiar else [""]))
    if forecast is not None:
        _show_forecast(forecast, len(ingredients))
    if found.get("scaled") is not None:
        _show_scaled(found["scaled"])
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


def _show_adapters(found: Mapping[str, Any]) -> None:
    def span(values: Sequence[float]) -> str:
        return f"{values[0]:.4g}" + (f" to {values[-1]:.4g}" if len(values) > 1 else "")

    rows: list[tuple[str, ...]] = []
    for entry in found["ingredients"]:
        one = entry["adapter"]
        cosine = "–" if one["cosine"] is None else f"{words.middle(one['nearest'], 24)} ({one['cosine']:.2f})"
        norm = "not finite" if one["norm"] is None else f"{one['norm']:.4g}"
        more = f" and {one['whole_tensors']} whole tensors" if one["whole_tensors"] else ""
        names = ", ".join(one["targets"][:4]) + (", ..." if len(one["targets"]) > 4 else "") + more
        rows.append((entry["name"], span(one["ranks"]), span(one["scales"]), norm, cosine, names))
    say(f"LoRA adapters on {shown(Path(found['base']['path']))}\n")
    table(("adapter", "rank", "scale", "norm of delta", "most alike (cosine)", "targets"), rows)


def _show_scaled(found: Mapping[str, Any]) -> None:
    ranks, together = found["ranks"], found["together"]
    ways = {
        "data": "each takes a part of every batch",
        "folds": "each learns whole folds",
        "shards": f"{together} hold one model together, {ranks // together} times",
    }
    settings = f" (method.parallel: shards, method.shards: {together})" if together > 1 else ""
    fits = "" if found["fits"] else ", and that is more than there is; fewer models at a time: method.block_size"
    seconds = found["seconds"]
    if seconds is None:
        time = f"not known: the model does not run without its weights ({found['unknown']})"
    else:
        best, worst = (words.seconds(one) if one >= 1 else f"{1000 * one:.3g} ms" for one in seconds)
        time = best if best == worst else f"{best} to {worst} (exchange behind the computation, or after it)"
    rows = [
        ("arrangement", f"{found['way']}: {ways[found['way']]}{settings}"),
        ("models at a time", f"{found['block']} as {found['directions']}"),
        ("memory per rank", f"{words.size(found['total'])} of {words.size(found['per_rank'])}{fits}"),
        ("sent per step by each rank", words.size(found["coefficients"])),
        ("  by FSDP2 besides", words.size(found["fsdp"])),
        ("  data parallelism would send", words.size(found["ddp"])),
        ("time per step", time),
    ]
    say(f"{found['method']} on {ranks} GPUs, batches of {found['batch']}: computed, not measured (docs/scaling.md)\n")
    for name, value in rows:
        say(f"  {name:<30}{value}")
    say()
