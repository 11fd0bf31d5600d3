"""All run directories of a zoo become one small JSON value: everything the tables and figures need."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.run.record import MethodRecord, RunRecord, read_run
from stockpot.soups.registry import LEARNED
from studies import paired
from studies.paired import method_of, models_of
from studies.plans import DEFAULT, MAIN, PAPER, block_size, blocks_of
from studies.zoo import read_object

FORMAT = 1
# Zoos whose test data begins with the data set's own test samples, and how many those are; training samples follow.
OWN_TEST = {"cifar10-efficientnet": 10_000, "fashion-vit": 10_000}

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
BARS = 80


def gather(runs: Path, zoo: str) -> dict[str, Any]:
    """Finished runs only; one that is still going on, or was stopped, is left out."""
    found = {path.parent.name: read_run(path.parent, tables=True) for path in sorted(runs.glob("*/run.json"))}
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


def _run(run: RunRecord, mains: Mapping[int, RunRecord]) -> dict[str, Any]:
    recipe = paired.recipe(run)
    seed = int(run.about["seed"])
    main = mains.get(seed)
    if main is run or (main is not None and paired.data(paired.recipe(main)) != paired.data(recipe)):
        main = None
    counted = counted_steps(run.path / "events.jsonl")
    return {
        "created": run.about["created"],
        "command": [_without_paths(str(word)) for word in run.about["command"]],
        "stockpot": run.about["stockpot"],
        "machine": _machine(run.about["environment"]),
        "jobs": _beside(run.path).get("jobs"),
        "seed": seed,
        "data": paired.data(recipe),
        "statistics": recipe["model"]["statistics"],
        "models": models_of(run),
        "failed": run.results.get("failed") or {},
        "methods": {
            method.name: {
                **_method(run, method, counted.get(method.name, 0)),
                "to_main": None if main is None else paired.difference(method, method_of(main, method.name)),
            }
            for method in run.methods
        },
        # Ours and the paper's best against everything beside them, sample by sample.
        "differences": {
            first: {other.name: paired.difference(ours, other) for other in run.methods if other.name != first}
            for first in (DEFAULT, PAPER)
            if (ours := method_of(run, first)) is not None
        },
    }


def _method(run: RunRecord, method: MethodRecord, counted: int) -> dict[str, Any]:
    result = method.result
    stated = dict(result["settings"])
    learned = method.name in LEARNED
    samples = int(result["fit"]["n"])
    value = {
        "settings": stated,
        "report": _score(method.scores.get("report")),
        "fit": _score(result["fit"]),
        "held_out": _score(result["held_out"]),
        "seconds": result["seconds"],
        "peak_host": result["peak_host"],
        "peak_device": result["peak_device"],
        "models_used": result["models_used"],
        "notes": list(result["notes"]),
        "guard": (result.get("guard") or {}).get("winner"),
        "steps": counted,
        "epochs": _epochs(method, counted, samples, models_of(run)),
    }
    if learned:
        models = models_of(run)
        value["b"], value["T"] = block_size(stated, models), blocks_of(stated, models)
        value["J"] = counted // (stated["folds"] * value["T"])
    return value


def _epochs(method: MethodRecord, counted: int, samples: int, models: int) -> float | None:
    """Passes over the fitting data, as the paper counts them: samples evaluated or learned from, over their number."""
    if method.name == "greedy":
        tried = (method.result.get("greedy") or [])[1:]  # the first was evaluated among the ingredients
        return models + sum(int(one["evaluated"]) for one in tried) / samples
    if method.name in LEARNED:
        settings = method.result["settings"]
        inside = samples if settings["folds"] == 1 else samples - samples // settings["folds"]
        return float(counted * min(settings["batch_size"], inside) / samples)
    return None


def _coefficients(mains: Mapping[int, RunRecord]) -> dict[str, Any]:
    run = mains.get(0)
    if run is None:
        return {}
    learned = [method for method in run.methods if method.name in LEARNED and method.W is not None]
    return {method.name: distribution(method) for method in learned}


def distribution(method: MethodRecord) -> dict[str, Any]:
    """How the mixing weights of a soup are distributed, in a few hundred numbers."""
    W = method.W
    assert W is not None  # (K, G)
    low, high = float(np.quantile(W, 0.001)), float(np.quantile(W, 0.999))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    # The outermost bars also count what lies beyond them.
    counts, edges = np.histogram(np.clip(W, low, high), bins=BARS, range=(low, high))
    return {
        "models": W.shape[0],
        "groups": W.shape[1],
        "edges": [float(edges[0]), float(edges[-1])],
        "counts": counts.tolist(),
        "outside": float(((W < -1e-9) | (W > 1 + 1e-9)).mean()),  # below 0 or above 1
        "near_zero": float((np.abs(W) < 0.1).mean()),
        "quantiles": dict(zip(map(str, QUANTILES), np.quantile(W, QUANTILES).tolist(), strict=True)),
        "by_ingredient": W.mean(axis=1).tolist(),
        "by_group": {
            name: np.quantile(W[:, g], (0.05, 0.5, 0.95)).tolist() for g, name in enumerate(method.result["groups"])
        },
    }


def counted_steps(events: Path) -> dict[str, int]:
    """Steps of each method as events.jsonl tells them; one that was repeated after an interruption counts once."""
    seen: dict[str, set[tuple[int, int, int]]] = {}
    method = None
    for line in events.read_text("utf-8").splitlines() if events.is_file() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # torn by an interruption
        if event["kind"] == "method":
            method = event["method"]
        elif event["kind"] == "step" and method is not None:
            seen.setdefault(method, set()).add((event["fold"], event["block"], event["step"]))
    return {name: len(places) for name, places in seen.items()}


def _ingredients(mains: Mapping[int, RunRecord]) -> list[dict[str, Any]]:
    run = mains.get(0)
    if run is None:
        return []
    seconds = _beside(run.path).get("trial_seconds") or []
    if len(seconds) != models_of(run):
        seconds = [None] * models_of(run)
    return [
        {
            "name": one["name"],
            "fit": None if one.get("fit") is None else one["fit"]["value"],
            "seconds": took,
            "trial": one.get("trial"),
        }
        for one, took in zip(run.pool["ingredients"], seconds, strict=True)
    ]


def _beside(folder: Path) -> dict[str, Any]:
    """What the study wrote beside the run."""
    return read_object(folder.with_name(f"{folder.name}.json"))


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("device", "cpu", "cores", "memory", "python", "torch", "libraries")
    return {key: environment.get(key) for key in kept}


def _score(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return (
        None if value is None else {"mean": value["value"], **{key: value[key] for key in ("low", "high", "n", "loss")}}
    )


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
