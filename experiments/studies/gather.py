"""All run directories of a zoo become one small JSON value: everything the tables and figures need."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stockpot.report.record import Method, Run, read
from stockpot.soups.blocks import blocks_for
from stockpot.soups.settings import LEARNED, Settings
from studies import paired, steps
from studies.coefficients import distribution
from studies.plans import DEFAULT, MAIN, PAPER

FORMAT = 1
# Zoos whose test data begins with the data set's own test samples, and how many those are; training samples follow.
OWN_TEST = {"cifar10-efficientnet": 10_000, "fashion-vit": 10_000}


def gather(runs: Path, zoo: str) -> dict[str, Any]:
    """Finished runs only; one that is still going on, or was stopped, is left out."""
    found = {path.parent.name: read(path.parent) for path in sorted(runs.glob("*/run.json"))}
    done = {name: run for name, run in found.items() if run.about.get("status") == "done"}
    first = done.get(MAIN)
    mains = {
        int(run.about["seed"]): run
        for name, run in done.items()
        if paired.study(name) in paired.AS_IT_IS and (first is None or paired.alike(run, first))
    }
    value = {
        "format": FORMAT,
        "zoo": zoo,
        "ingredients": _ingredients(mains),
        "parameters": next((run.pool.get("parameters") for run in mains.values()), None),
        "over_seeds": paired.over_seeds(mains),
        "own_test": paired.over_seeds(mains, OWN_TEST[zoo]) if zoo in OWN_TEST else {},
        "variants": paired.variants(done, mains),
        "rounding": paired.rounding(done, mains),
        "coefficients": _coefficients(mains),
        "runs": {name: _run(run, mains) for name, run in done.items()},
    }
    rounded = _rounded(value)
    assert isinstance(rounded, dict)
    return rounded


def _run(run: Run, mains: Mapping[int, Run]) -> dict[str, Any]:
    recipe = paired.recipe(run)
    seed = int(run.about["seed"])
    main = mains.get(seed)
    if main is run or (main is not None and paired.data(paired.recipe(main)) != paired.data(recipe)):
        main = None
    counted = steps.counted(run.path / "events.jsonl")
    return {
        "created": run.about["created"],
        "command": [_without_paths(str(word)) for word in run.about["command"]],
        "stockpot": run.about["stockpot"],
        "machine": _machine(run.about["environment"]),
        "jobs": _beside(run.path).get("jobs"),
        "seed": seed,
        "data": paired.data(recipe),
        "statistics": recipe["model"]["statistics"],
        "models": len(run.ingredients),
        "failed": run.results.get("failed") or {},
        "methods": {
            method.name: {
                **_method(run, method, counted.get(method.name, 0)),
                "to_main": None if main is None else paired.difference(method, main.method(method.name)),
            }
            for method in run.methods
        },
        # Ours and the paper's best against everything beside them, sample by sample.
        "differences": {
            first: {
                other.name: paired.difference(run.method(first), other)
                for other in run.methods
                if other.name != first
            }
            for first in (DEFAULT, PAPER)
            if run.method(first) is not None
        },
    }


def _method(run: Run, method: Method, counted: int) -> dict[str, Any]:
    result = method.result
    stated = dict(result["settings"])
    learned = method.name in LEARNED
    samples = int(result["fit"]["n"])
    value = {
        "settings": stated,
        "report": _score(result["report"]),
        "fit": _score(result["fit"]),
        "held_out": _score(result["held_out"]),
        "seconds": result["seconds"],
        "peak_host": result["peak_host"],
        "peak_device": result["peak_device"],
        "models_used": result["models_used"],
        "notes": method.notes,
        "guard": (result.get("guard") or {}).get("winner"),
        "steps": counted,
        "epochs": _epochs(method, counted, samples, len(run.ingredients)),
    }
    if learned:
        settings = _settings(stated)
        blocks = blocks_for(settings, len(run.ingredients))
        value["b"], value["T"] = len(blocks[0]), len(blocks)
        value["J"] = counted // (settings.folds * value["T"])
    return value


def _epochs(method: Method, counted: int, samples: int, models: int) -> float | None:
    """Passes over the fitting data, as the paper counts them: samples evaluated or learned from, over their number."""
    if method.name == "greedy":
        tried = (method.result.get("greedy") or [])[1:]  # the first was evaluated among the ingredients
        return models + sum(int(one["evaluated"]) for one in tried) / samples
    if method.name in LEARNED:
        settings = method.result["settings"]
        inside = samples if settings["folds"] == 1 else samples - samples // settings["folds"]
        return float(counted * min(settings["batch_size"], inside) / samples)
    return None


def _coefficients(mains: Mapping[int, Run]) -> dict[str, Any]:
    run = mains.get(0)
    if run is None:
        return {}
    learned = [method for method in run.methods if method.name in LEARNED and method.W is not None]
    return {method.name: distribution(method) for method in learned}


def _ingredients(mains: Mapping[int, Run]) -> list[dict[str, Any]]:
    run = mains.get(0)
    if run is None:
        return []
    seconds = _beside(run.path).get("trial_seconds") or []
    if len(seconds) != len(run.ingredients):
        seconds = [None] * len(run.ingredients)
    return [
        {
            "name": one["name"],
            "fit": None if one.get("fit") is None else one["fit"]["mean"],
            "seconds": took,
            "trial": one.get("trial"),
        }
        for one, took in zip(run.ingredients, seconds, strict=True)
    ]


def _beside(folder: Path) -> dict[str, Any]:
    """What the study wrote beside the run."""
    try:
        value = json.loads(folder.with_name(f"{folder.name}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("device", "cpu", "cores", "memory", "python", "torch", "libraries")
    return {key: environment.get(key) for key in kept}


def _score(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else {key: value.get(key) for key in ("mean", "low", "high", "n", "loss")}


def _settings(stated: Mapping[str, Any]) -> Settings:
    """As far as this version knows them; a granularity of the user's own has no name in the record."""
    known = {field.name for field in dataclasses.fields(Settings)}
    granularity = "tensor" if stated["granularity"] == "custom" else stated["granularity"]
    return Settings(**{**{k: v for k, v in stated.items() if k in known}, "granularity": granularity})


def _without_paths(word: str) -> str:
    """A long list of ingredients says nothing to a reader."""
    return "pool.path=[...]" if word.startswith("pool.path=") else word


def _rounded(value: Any) -> Any:
    """Six digits are enough, and the file stays small."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_rounded(item) for item in value]
    return value
