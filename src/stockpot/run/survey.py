"""Everything worth knowing about a pool before it is cooked, as plain values."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch

from stockpot.errors import LayoutError, PoolError
from stockpot.events import Listener, ignore
from stockpot.layout import Layout, mixing_dtype
from stockpot.pool import Pool
from stockpot.run.distances import distances
from stockpot.run.forecast import NOT_INCLUDED, Size, forecasts, largest_block
from stockpot.run.ingredients import trial_settings
from stockpot.run.scores import number


def survey(pool: Pool, budget: int | None = None, listen: Listener = ignore) -> dict[str, Any]:
    """Reads every checkpoint three times at most: for its digest, for NaN, for the distances."""
    facts = pool.facts(listen)
    problems: list[str] = []
    try:
        pool.verify_finite(listen)
    except PoolError as error:
        problems.append(str(error))
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
                "trial": trial_settings(checkpoint.path),
            }
            for name, checkpoint, digest in zip(pool.names, pool.checkpoints, facts.digests, strict=True)
        ],
        "parameters": sum(spec.numel for spec in pool.specs.values()),
        "tensors": len(pool.specs),
        "dtypes": dict(
            Counter(str(spec.dtype).removeprefix("torch.") for spec in pool.specs.values()).most_common()
        ),
        "frozen": sorted(facts.frozen),
        "tied": [list(names) for names in facts.tied],
        "duplicates": [[pool.names[k] for k in group] for group in facts.duplicates],
        "distances": None,
        "outlier": None,
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
    for entry, distance in zip(found["ingredients"], measured.to_mean.tolist(), strict=True):
        entry["to_mean"] = number(distance)
    outlier = measured.outlier()
    found["outlier"] = None if outlier is None else pool.names[outlier]
    found["forecast"] = _forecast(pool, layout, budget)
    return found


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
