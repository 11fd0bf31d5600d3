"""pool.json: who the ingredients are; and their scores, kept so that a continued run need not score them again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from stockpot import atomic, small_files
from stockpot.events import Listener
from stockpot.layout import Layout
from stockpot.pool import Pool, PoolFacts
from stockpot.run.directory import POOL, RunDirectory, refused
from stockpot.run.distances import distances
from stockpot.run.reading import read_json, readable
from stockpot.run.scores import decode, encode, number
from stockpot.soups.kitchen import Kitchen

SCORES = "ingredients.safetensors"


def describe_pool(pool: Pool, layout: Layout, listen: Listener) -> dict[str, Any]:
    """Everything about the pool that the record holds before anything is scored."""
    facts = pool.facts(listen)
    measured = distances(pool, layout, listen)
    dtypes = Counter(str(spec.dtype).removeprefix("torch.") for spec in pool.specs.values())
    return {
        "ingredients": [
            {
                "name": name,
                "path": str(checkpoint.path),
                "format": checkpoint.format,
                "bytes": checkpoint.nbytes,
                "digest": digest,
                "fit": None,
                "trial": trial_settings(checkpoint.path),
            }
            for name, checkpoint, digest in zip(pool.names, pool.checkpoints, facts.digests, strict=True)
        ],
        "parameters": count_parameters(pool, facts),
        "tensors": len(pool.specs),
        "dtypes": dict(dtypes.most_common()),
        "frozen": sorted(facts.frozen),
        "tied": [list(names) for names in facts.tied],
        "duplicates": [list(group) for group in facts.duplicates],
        "distances": [[number(d) for d in row] for row in measured.pairs.tolist()],
        "to_mean": [number(d) for d in measured.to_mean.tolist()],
        "norms": [number(d) for d in measured.norms.tolist()],
    }


def count_parameters(pool: Pool, facts: PoolFacts) -> int:
    """What is learned: no running statistics, no counters, and tied tensors once."""
    again = {name for names in facts.tied for name in names[1:]}
    return sum(
        spec.numel
        for name, spec in pool.specs.items()
        if name not in again
        and name not in pool.statistics
        and (spec.dtype.is_floating_point or spec.dtype.is_complex)
    )


def trial_settings(path: Path) -> dict[str, Any] | None:
    """What `stockpot finetune` wrote beside a checkpoint about its training."""
    beside = path.with_name(f"{path.name}.json") if path.is_dir() else path.with_suffix(".json")
    try:
        value = small_files.read_json(beside)
    except (OSError, ValueError):
        return None
    settings = value.get("settings") if isinstance(value, dict) else None
    return settings if isinstance(settings, dict) else None


def write_pool(directory: RunDirectory, pool: Pool, layout: Layout, listen: Listener) -> None:
    """pool.json of a new run; for a continued one, proof that the ingredients are the same."""
    earlier = directory.read_json(POOL)
    if earlier is None:
        directory.write_json(POOL, describe_pool(pool, layout, listen))
        return
    before = {entry["name"]: entry["digest"] for entry in earlier["ingredients"]}
    now = dict(zip(pool.names, pool.digests(listen), strict=True))
    lines = [f"{name}: gone" for name in before if name not in now]
    lines += [f"{name}: new" for name in now if name not in before]
    lines += [f"{name}: other content" for name in now if name in before and before[name] != now[name]]
    if not lines and list(before) != list(now):
        lines = ["the order of the ingredients"]
    if lines:
        shown = lines if len(lines) <= 8 else [*lines[:8], f"and {len(lines) - 8} more"]
        raise refused(directory.path, "the ingredients this run was started with", "others", shown)


def restore_scores(directory: RunDirectory, kitchen: Kitchen) -> None:
    path = directory.path / SCORES
    if not path.exists():
        return
    with readable(path), safe_open(path, framework="pt") as file:
        values = file.get_tensor("values")  # (K, N)
        kept = json.loads(file.metadata()["values"])
    kitchen.remember(
        [decode(score, row) for score, row in zip(kept["scores"], values, strict=True)], kept["seconds"]
    )


def keep_scores(directory: RunDirectory, kitchen: Kitchen) -> None:
    """Once somebody has scored the ingredients: into pool.json for readers, and sample by sample for ourselves."""
    path = directory.path / SCORES
    if kitchen.known is None or path.exists():
        return
    encoded = [encode(score) for score in kitchen.known]
    kept = {"scores": encoded, "seconds": kitchen.individual_seconds}
    values = torch.stack([score.values for score in kitchen.known])
    pool = read_json(directory.path / POOL)
    for entry, score in zip(pool["ingredients"], encoded, strict=True):
        entry["fit"] = score
    directory.write_json(POOL, pool)
    # Last: once it is there, nobody looks at the other file again.
    atomic.write_bytes(path, save({"values": values}, metadata={"values": json.dumps(kept)}))
