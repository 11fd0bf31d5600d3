"""What `stockpot inspect` finds out, as plain values: of a pool, of its adapters, and of a recipe on several GPUs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stockpot.cli.terminal import shown
from stockpot.errors import LayoutError, PoolError, StockpotError, describe
from stockpot.events import Listener, ignore

if TYPE_CHECKING:
    from torch import nn

    from stockpot.layout import Layout
    from stockpot.pool import Pool
    from stockpot.pool.lora import Adapters
    from stockpot.recipe import Recipe
    from stockpot.soups.forecast import Work


def survey(
    pool: Pool, budget: int | None = None, listen: Listener = ignore, *, nonfinite: str = "refuse"
) -> dict[str, Any]:
    """Everything worth knowing about a pool before it is cooked, as plain values.

    `nonfinite`: what is done with checkpoints that are not finite, as in a recipe's pool section.
    """
    from stockpot.layout import Layout
    from stockpot.pool.facts import strangers_of
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
        strangers=[pool.names[k] for k in strangers_of(pool.checkpoints, pool.specs)],
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


def describe_adapters(adapters: Adapters, found: dict[str, Any]) -> None:
    """Ranks, scales and targets, and how long and how alike the deltas are, by their factors alone."""
    from stockpot.pool.lora_scan import inner_products
    from stockpot.run.shapes import plain

    products = inner_products(adapters)  # (K, K)
    lengths = products.diagonal().clamp_min(0).sqrt()
    cosines = products / (lengths[:, None] * lengths[None, :])
    for k, (one, entry) in enumerate(zip(adapters.each, found["ingredients"], strict=True)):
        ranks = sorted({one.file.specs[factors.A].shape[0] for factors in one.factors.values()})
        scales = sorted({factors.scale for factors in one.factors.values()})
        targets = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in one.factors})
        others = cosines[k].clone().nan_to_num(-2)
        others[k] = -2
        near = int(others.argmax())
        entry["adapter"] = {
            "ranks": ranks, "scales": scales, "targets": targets, "modules": len(one.factors),
            "whole_tensors": len(one.dense) + len(one.added), "base": one.base[0], "revision": one.base[1],
            **plain({"norm": float(lengths[k]), "cosine": float(cosines[k, near])}),
            "nearest": found["ingredients"][near]["name"],
        }  # fmt: skip
    found["cosines"] = plain(cosines.tolist())


def without_refused(sources: Sequence[str], options: Mapping[str, Any], error: PoolError) -> tuple[Pool, list[str]]:
    """Of adapters, those that a soup could take, and why it could not take the others."""
    from stockpot.pool import Pool
    from stockpot.pool.discover import find_checkpoints
    from stockpot.pool.lora import sorted_out
    from stockpot.pool.peft_folders import adapter_folder

    paths, wrong = find_checkpoints(sources)
    folders = [folder for path in paths if (folder := adapter_folder(path)) is not None]
    if wrong or len(folders) < 3:
        raise error
    usable, refused = sorted_out(folders, options["base"], options["rename"])
    full = [path for path in paths if adapter_folder(path) is None]
    expected, fix = "a LoRA adapter, as the others are", "leave it out, or merge the adapters into full checkpoints"
    refused += [describe(shown(path), expected=expected, found="a full checkpoint", fix=fix) for path in full]
    if len(usable) < 2:
        raise error
    return Pool.open(*usable, **options), refused


def check_model(found: dict[str, Any], pool: Pool, recipe: Recipe) -> None:
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


def describe_scaled(recipe: Recipe, pool: Pool, ranks: int, memory: int, bandwidth: int | None) -> dict[str, Any]:
    """The arrangement of the recipe's method on so many ranks, as plain values."""
    from stockpot.soups.forecast import Pieces, arranged

    work, method, why = _work(recipe, pool)
    pieces = Pieces() if bandwidth is None else Pieces(inside=float(bandwidth), between=float(bandwidth))
    found = {"method": method, "batch": work.batch, "block": work.block, "unknown": why, "per_rank": memory}
    return {**found, **arranged(work, ranks, memory, pieces).to_json()}


def _work(recipe: Recipe, pool: Pool) -> tuple[Work, str, str | None]:
    """What is learned, by which method, and why the FLOPs are not known."""
    from stockpot.layout import Layout
    from stockpot.recipe.build import cook_arguments
    from stockpot.soups.forecast import Size, work_of
    from stockpot.soups.registry import DEFAULT, METHODS, settings_for
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
    forward, why = _flops(recipe)
    return (
        work_of(
            size, width=width, block=block_size_for(settings, len(pool)), groups=len(layout.groups),
            folds=settings.folds, batch=settings.batch_size, forward=forward,
            names={name: pool.specs[name].numel for name in layout.group_of},
        ),
        method,
        why,
    )  # fmt: skip


def _flops(recipe: Recipe) -> tuple[float | None, str | None]:
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
