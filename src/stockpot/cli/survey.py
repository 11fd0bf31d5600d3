"""Everything worth knowing about a pool before it is cooked, as plain values."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch import nn

from stockpot.errors import LayoutError, PoolError, StockpotError, describe
from stockpot.events import Listener, ignore
from stockpot.layout import Layout, mixing_dtype
from stockpot.pool import Pool
from stockpot.recipe import Recipe
from stockpot.recipe.build import build_model
from stockpot.run.distances import distances
from stockpot.run.forecast import NOT_INCLUDED, Size, forecasts, largest_block
from stockpot.run.ingredients import count_parameters, trial_settings
from stockpot.run.scores import number
from stockpot.task.checks import differences


def survey(
    pool: Pool, budget: int | None = None, listen: Listener = ignore, *, nonfinite: str = "refuse"
) -> dict[str, Any]:
    """Reads every checkpoint three times at most: for its digest, for NaN, for the distances.

    `nonfinite`: what is done with checkpoints that are not finite, as in a recipe's pool section.
    """
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
    measured = distances(pool, layout, listen)
    found["distances"] = [[number(d) for d in row] for row in measured.pairs.tolist()]
    lengths = zip(measured.to_mean.tolist(), measured.norms.tolist(), strict=True)
    for entry, (distance, norm) in zip(found["ingredients"], lengths, strict=True):
        entry["to_mean"], entry["norm"] = number(distance), number(norm)
    outlier = measured.outlier()
    found["outlier"] = None if outlier is None else pool.names[outlier]
    found["strangers"] = [pool.names[k] for k in measured.strangers()]
    found["forecast"] = _forecast(pool, layout, budget)
    return found


def against_model(found: dict[str, Any], pool: Pool, recipe: Recipe) -> None:
    """Whether the pool's tensors are those of the recipe's model, into `found`."""
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
    # Tied tensors lie in the flat vector once.
    first_of = {name: names[0] for names in layout.tied for name in names}
    mixed = [name for name in layout.group_of if first_of.get(name, name) == name]
    size = Size(
        models=len(pool),
        parameters=sum(pool.specs[name].numel for name in mixed),
        ingredient=pool.nbytes,
        double=any(mixing_dtype(pool.specs[name].dtype) == torch.float64 for name in mixed),
        gpu=torch.cuda.is_available(),
    )
    value: dict[str, Any] = {
        "budget": budget,
        "device": "cuda" if size.gpu else "cpu",
        "mixed_parameters": size.parameters,
        "not_included": NOT_INCLUDED,
        "rows": [dataclasses.asdict(row) for row in forecasts(size, budget)],
        "largest_block": None,
    }
    if budget is not None:
        value["largest_block"] = {
            name: largest_block(size, name, budget) for name in ("mehl", "mehl+", "crossfit")
        }
    return value
