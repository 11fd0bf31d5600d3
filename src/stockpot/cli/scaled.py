"""`stockpot inspect RECIPE --ranks N --memory SIZE`: what several GPUs would do, computed, not measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stockpot import words
from stockpot.cli.terminal import say

if TYPE_CHECKING:
    from stockpot.pool import Pool
    from stockpot.recipe import Recipe
    from stockpot.soups.scaled import Work


def describe_scaled(recipe: Recipe, pool: Pool, ranks: int, memory: int, bandwidth: int | None) -> dict[str, Any]:
    """The arrangement of the recipe's method on so many ranks, as plain values."""
    from stockpot.soups.scaled import Pieces, arranged

    work, method, why = _work(recipe, pool)
    pieces = Pieces() if bandwidth is None else Pieces(inside=float(bandwidth), between=float(bandwidth))
    found = {"method": method, "batch": work.batch, "block": work.block, "unknown": why, "per_rank": memory}
    return {**found, **arranged(work, ranks, memory, pieces).to_json()}


def _work(recipe: Recipe, pool: Pool) -> tuple[Work, str, str | None]:
    """What is learned, by which method, and why the FLOPs are not known."""
    from stockpot.layout import Layout
    from stockpot.recipe.build import cook_arguments
    from stockpot.soups.forecast import Size
    from stockpot.soups.registry import DEFAULT, METHODS, settings_for
    from stockpot.soups.scaled import work_of
    from stockpot.soups.settings import Settings, block_size_for

    arguments = cook_arguments(recipe)
    named = arguments["method"]
    method = named if METHODS[named].learned else DEFAULT
    own = {one.name: arguments[one.name] for one in dataclasses.fields(Settings) if one.name in arguments}
    settings = settings_for(method, arguments["preset"], **(own if method == named else {"seed": arguments["seed"]}))
    choices = {name: arguments[name] for name in ("include", "exclude", "donor")}
    layout = Layout.of(pool, settings.granularity, facts=pool.facts(), **choices)
    size = dataclasses.replace(Size.of(pool, layout), gpu=True)
    mixed = [pool.specs[name] for name in layout.group_of]
    width = max(spec.nbytes // max(1, spec.numel) for spec in mixed)
    forward, why = _forward(recipe)
    return (
        work_of(
            size, width=width, block=block_size_for(settings, len(pool)), groups=len(layout.groups),
            folds=settings.folds, batch=settings.batch_size, forward=forward,
            names={name: pool.specs[name].numel for name in layout.group_of},
        ),
        method,
        why,
    )  # fmt: skip


def _forward(recipe: Recipe) -> tuple[float | None, str | None]:
    """FLOPs of one sample's forward pass, counted on a model without weights; or why they cannot be."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from stockpot.recipe.build import build_data, build_model
    from stockpot.task import Data
    from stockpot.task.batches import call, on_device

    try:
        loaded = build_model(recipe)
        data = Data.of(build_data(recipe, loaded, ("fit",))["fit"], name="fit data")
        samples = min(4, len(data))
        batch = on_device(data.batch(torch.arange(samples)), torch.device("meta"))
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            call(loaded.model.to("meta").eval(), batch)
        return counted.get_total_flops() / samples, None
    except Exception as error:  # a model's own code may need values, and raises anything
        return None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"


def show_scaled(found: Mapping[str, Any]) -> None:
    """The same for people."""
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
