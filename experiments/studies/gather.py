"""All run directories of a zoo become one small JSON value: everything the tables and figures need."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.methods.settings import LEARNED, Settings, block_size_for
from stockpot.recipe.yaml_text import parse
from stockpot.report.record import Method, Run, read
from studies import intervals, steps
from studies.coefficients import distribution
from studies.plans import DEFAULT, EXACT, MAIN, PAPER

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
        if _study(name) in _AS_IT_IS and (first is None or _alike(run, first))
    }
    value = {
        "format": FORMAT,
        "zoo": zoo,
        "ingredients": _ingredients(mains),
        "parameters": next((run.pool.get("parameters") for run in mains.values()), None),
        "over_seeds": _over_seeds(mains),
        "own_test": _over_seeds(mains, OWN_TEST[zoo]) if zoo in OWN_TEST else {},
        "variants": _variants(done, mains),
        "rounding": _rounding(done, mains),
        "coefficients": _coefficients(mains),
        "runs": {name: _run(run, mains) for name, run in done.items()},
    }
    rounded = _rounded(value)
    assert isinstance(rounded, dict)
    return rounded


_AS_IT_IS = ("main", "seeds")  # studies whose runs change nothing but the seed


def _study(name: str) -> str:
    return name.partition("-")[0]


def _run(run: Run, mains: Mapping[int, Run]) -> dict[str, Any]:
    recipe = _recipe(run)
    seed = int(run.about["seed"])
    main = mains.get(seed)
    if main is run or (main is not None and _data(_recipe(main)) != _data(recipe)):
        main = None
    counted = steps.counted(run.path / "events.jsonl")
    return {
        "created": run.about["created"],
        "command": [_without_paths(str(word)) for word in run.about["command"]],
        "stockpot": run.about["stockpot"],
        "machine": _machine(run.about["environment"]),
        "jobs": _beside(run.path).get("jobs"),
        "seed": seed,
        "data": _data(recipe),
        "statistics": recipe["model"]["statistics"],
        "models": len(run.ingredients),
        "failed": run.results.get("failed") or {},
        "methods": {
            method.name: {
                **_method(run, method, counted.get(method.name, 0)),
                "to_main": None if main is None else _difference(method, main.method(method.name)),
            }
            for method in run.methods
        },
        # Ours and the paper's best against everything beside them, sample by sample.
        "differences": {
            first: {
                other.name: _difference(run.method(first), other)
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
        value["b"] = block_size_for(settings, len(run.ingredients))
        value["T"] = steps.visits(settings, len(run.ingredients))
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


def _over_seeds(mains: Mapping[int, Run], first: int | None = None) -> dict[str, Any]:
    """Every method's score over its seeds, and how far ours is above it, paired sample by sample.

    `first`: on so many of the samples alone, from the beginning.
    """
    names = list(dict.fromkeys(method.name for run in mains.values() for method in run.methods))
    out: dict[str, Any] = {}
    for name in names:
        own = {seed: run.method(name) for seed, run in sorted(mains.items())}
        scored = {seed: m for seed, m in own.items() if m is not None and "report" in m.values}
        if not scored or len({m.values["report"].shape for m in scored.values()}) > 1:
            continue
        one = next(iter(scored.values()))
        values = np.stack([method.values["report"][:first] for method in scored.values()])  # (S, n)
        batches = one.result["report"].get("batches")
        by_seed = values.mean(axis=1)  # (S,)
        out[name] = {
            "seeds": list(scored),
            "report": intervals.over_seeds(values, batches),
            "n": values.shape[1],
            "by_seed": by_seed.tolist(),
            "spread": float(by_seed.max() - by_seed.min()),
            "fit": float(np.mean([m.values["fit"].mean() for m in scored.values()])),
            "seconds": [m.result["seconds"] for m in scored.values()],
        }
        # What no seed changes may have been run with one of them: then all of ours are compared with that.
        ours = {seed: mains[seed].method(DEFAULT) for seed in (scored if name in LEARNED else mains)}
        both = [
            (mine.values["report"] - scored.get(seed, one).values["report"])[:first]
            for seed, mine in ours.items()
            if mine is not None and mine.values.get("report", np.empty(0)).shape == one.values["report"].shape
        ]
        if both and name != DEFAULT:
            out[name]["default_minus"] = intervals.over_seeds(np.stack(both), batches)
    return out


def _variants(done: Mapping[str, Run], mains: Mapping[int, Run]) -> dict[str, Any]:
    """Studies that repeat some methods of `main` their own way, seed by seed: all seeds together."""
    groups: dict[str, dict[int, Run]] = {}
    for name, run in done.items():
        variant, _, seed = name.rpartition("-")
        own = mains.get(int(run.about["seed"]))
        if _study(name) in _AS_IT_IS or own is None:
            continue
        if seed == str(run.about["seed"]) and _alike(run, own):
            groups.setdefault(variant, {})[int(seed)] = run
    return {
        variant: {
            method.name: found
            for method in next(iter(runs.values())).methods
            if (found := _variant(method.name, runs, mains)) is not None
        }
        for variant, runs in groups.items()
        if len(runs) > 1
    }


def _variant(name: str, runs: Mapping[int, Run], mains: Mapping[int, Run]) -> dict[str, Any] | None:
    pairs = [(run.method(name), mains[seed].method(name)) for seed, run in sorted(runs.items())]
    values = [
        (one.values["report"], other.values["report"])
        for one, other in pairs
        if one is not None and other is not None and "report" in one.values and "report" in other.values
    ]
    if len(values) < len(runs):
        return None
    theirs = np.stack([mine for mine, _ in values])  # (S, n)
    ours = np.stack([other for _, other in values])
    return {"report": intervals.over_seeds(theirs), "to_main": intervals.over_seeds(theirs - ours)}


def _rounding(done: Mapping[str, Run], mains: Mapping[int, Run]) -> dict[str, Any]:
    """Scores with models rounded while learning, minus those without, over the seeds that have both."""
    kinds: dict[str, dict[int, Run]] = {"main": dict(mains)}
    for name, run in done.items():
        study, _, rest = name.partition("-")
        if study == "directions":
            kinds.setdefault(rest.rpartition("-")[0], {})[int(run.about["seed"])] = run
    exact = kinds.pop(EXACT, {})
    out: dict[str, Any] = {}
    for name in dict.fromkeys(method.name for run in exact.values() for method in run.methods):
        found = {kind: _minus(name, runs, exact) for kind, runs in kinds.items()}
        out[name] = {kind: value for kind, value in found.items() if value is not None}
    return out


def _minus(name: str, runs: Mapping[int, Run], exact: Mapping[int, Run]) -> dict[str, Any] | None:
    """Mean difference with its interval, and the paired standard error."""
    pairs = {
        seed: (_report(runs[seed], name), _report(exact[seed], name)) for seed in sorted({*runs} & {*exact})
    }
    both = {
        seed: (one, two)
        for seed, (one, two) in pairs.items()
        if one is not None and two is not None and one.shape == two.shape and _alike(runs[seed], exact[seed])
    }
    if not both:
        return None
    difference = intervals.over_seeds(np.stack([one - two for one, two in both.values()]))
    return {
        "seeds": list(both),
        "exact": float(np.mean([two.mean() for _, two in both.values()])),
        "difference": difference,
        "error": intervals.standard_error(difference),
    }


def _report(run: Run, name: str) -> intervals.Numbers | None:
    method = run.method(name)
    return None if method is None else method.values.get("report")


def _alike(run: Run, main: Run) -> bool:
    return _data(_recipe(run)) == _data(_recipe(main)) and len(run.ingredients) == len(main.ingredients)


def _difference(first: Method | None, second: Method | None) -> intervals.Interval | None:
    """Mean of first minus second on the report data with its 95 % interval, paired sample by sample."""
    if first is None or second is None:
        return None
    one, two = (method.values.get("report") for method in (first, second))
    if one is None or two is None or one.shape != two.shape:
        return None
    return intervals.over_samples(one - two, first.result["report"].get("batches"))


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


def _data(recipe: Mapping[str, Any]) -> str:
    """What was fitted and reported on: results on other data are not to be compared."""
    section = recipe["data"]
    return json.dumps(
        {key: section.get(key) for key in ("fit", "report", "options", "split_seed")}, sort_keys=True
    )


def _recipe(run: Run) -> Mapping[str, Any]:
    value = parse(run.recipe, "recipe.yaml")
    assert isinstance(value, dict)
    return value


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
