"""How far runs and methods are apart, paired sample by sample; and which runs may be compared at all.

Over several seeds, a difference varies with the test samples and with the seed. Both are taken as drawn at random and
independently of each other. The variance of the mean is that of the samples' means (averaged over seeds) plus that of
the seeds' means (averaged over samples); what is due to neither alone is counted in both. The seeds are few, so their
part has Student's quantile (4.30 with three seeds) and only the samples' part the normal one (1.96).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stockpot.run.record import MethodRecord, RunRecord
from stockpot.soups.registry import LEARNED
from studies.plans import DEFAULT, EXACT

Numbers = NDArray[np.float64]
Interval = tuple[float, float, float]  # mean, low, high
AS_IT_IS = ("main", "seeds")  # studies whose runs change nothing but the seed
NORMAL = 1.959964
# Student's quantile for a 95 % interval by degrees of freedom; beyond nine the last one is a little too wide.
STUDENT = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216)


def method_of(run: RunRecord, name: str) -> MethodRecord | None:
    return next((method for method in run.methods if method.name == name), None)


def scores_of(method: MethodRecord | None) -> Numbers | None:
    """On the report data, sample by sample, (n,): the metrics of the zoos are means over samples."""
    table = None if method is None else method.tables.get("report")
    return None if table is None else table[:, 0]


def models_of(run: RunRecord) -> int:
    return len(run.pool["ingredients"])


def interval_over_samples(values: Numbers) -> Interval:
    """One run: values (n,) are scores, or differences of scores on the same samples."""
    return interval_over_seeds(values[None])


def interval_over_seeds(values: Numbers) -> Interval:
    """Several runs on the same samples: values (S, n)."""
    by_sample, by_seed = values.mean(axis=0), values.mean(axis=1)  # (n,), (S,)
    return around(float(values.mean()), float(by_sample.var(ddof=1)) / by_sample.size, by_seed)


def around(mean: float, of_samples: float, by_seed: Numbers) -> Interval:
    """`of_samples`: the variance of the mean that is due to the samples; `by_seed` (S,): the mean of each seed."""
    half = math.hypot(NORMAL * math.sqrt(of_samples), student(by_seed.size) * error_of_seeds(by_seed))
    return mean, mean - half, mean + half


def student(seeds: int) -> float:
    return STUDENT[min(seeds, len(STUDENT) + 1) - 2] if seeds > 1 else NORMAL


def error_of_seeds(by_seed: Numbers) -> float:
    return float(by_seed.std(ddof=1)) / math.sqrt(by_seed.size) if by_seed.size > 1 else 0.0


def standard_error(values: Numbers) -> float:
    """Of the mean over samples and seeds; values (S, n)."""
    by_sample = values.mean(axis=0)
    return math.hypot(float(by_sample.std(ddof=1)) / math.sqrt(by_sample.size), error_of_seeds(values.mean(axis=1)))


def over_seeds(mains: Mapping[int, RunRecord], first: int | None = None) -> dict[str, Any]:
    """Every method's score over its seeds, and how far ours is above it, paired sample by sample.

    `first`: on so many of the samples alone, from the beginning.
    """
    names = list(dict.fromkeys(method.name for run in mains.values() for method in run.methods))
    out: dict[str, Any] = {}
    for name in names:
        found = {seed: method_of(run, name) for seed, run in sorted(mains.items())}
        own = {seed: values for seed, method in found.items() if (values := scores_of(method)) is not None}
        if not own or len({values.shape for values in own.values()}) > 1:
            continue
        one = next(iter(own.values()))
        scored = [method for seed in own if (method := found[seed]) is not None]
        values = np.stack([scores[:first] for scores in own.values()])  # (S, n)
        by_seed = values.mean(axis=1)  # (S,)
        out[name] = {
            "seeds": list(own),
            "report": interval_over_seeds(values),
            "n": values.shape[1],
            "by_seed": by_seed.tolist(),
            "spread": float(by_seed.max() - by_seed.min()),
            "fit": float(np.mean([method.tables["fit"][:, 0].mean() for method in scored])),
            "seconds": [method.result["seconds"] for method in scored],
        }
        # What no seed changes may have been run with one of them: then all of ours are compared with that.
        ours = {seed: _report(mains[seed], DEFAULT) for seed in (own if name in LEARNED else mains)}
        both = [
            (mine - own.get(seed, one))[:first]
            for seed, mine in ours.items()
            if mine is not None and mine.shape == one.shape
        ]
        if both and name != DEFAULT:
            out[name]["default_minus"] = interval_over_seeds(np.stack(both))
    return out


def variants(done: Mapping[str, RunRecord], mains: Mapping[int, RunRecord]) -> dict[str, Any]:
    """Studies that repeat some methods of `main` their own way, seed by seed: all seeds together."""
    groups: dict[str, dict[int, RunRecord]] = {}
    for name, run in done.items():
        variant, _, seed = name.rpartition("-")
        own = mains.get(int(run.about["seed"]))
        if study(name) in AS_IT_IS or own is None:
            continue
        if seed == str(run.about["seed"]) and alike(run, own):
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


def _variant(name: str, runs: Mapping[int, RunRecord], mains: Mapping[int, RunRecord]) -> dict[str, Any] | None:
    pairs = [(_report(run, name), _report(mains[seed], name)) for seed, run in sorted(runs.items())]
    values = [(one, other) for one, other in pairs if one is not None and other is not None]
    if len(values) < len(runs):
        return None
    theirs = np.stack([mine for mine, _ in values])  # (S, n)
    ours = np.stack([other for _, other in values])
    return {"report": interval_over_seeds(theirs), "to_main": interval_over_seeds(theirs - ours)}


def rounding(done: Mapping[str, RunRecord], mains: Mapping[int, RunRecord]) -> dict[str, Any]:
    """Scores with models rounded while learning, minus those without, over the seeds that have both."""
    kinds: dict[str, dict[int, RunRecord]] = {"main": dict(mains)}
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


def _minus(name: str, runs: Mapping[int, RunRecord], exact: Mapping[int, RunRecord]) -> dict[str, Any] | None:
    """Mean difference with its interval, and the paired standard error."""
    pairs = {seed: (_report(runs[seed], name), _report(exact[seed], name)) for seed in sorted({*runs} & {*exact})}
    both = {
        seed: (one, two)
        for seed, (one, two) in pairs.items()
        if one is not None and two is not None and one.shape == two.shape and alike(runs[seed], exact[seed])
    }
    if not both:
        return None
    moved = np.stack([one - two for one, two in both.values()])  # (S, n)
    return {
        "seeds": list(both),
        "exact": float(np.mean([two.mean() for _, two in both.values()])),
        "difference": interval_over_seeds(moved),
        "error": standard_error(moved),
    }


def _report(run: RunRecord, name: str) -> Numbers | None:
    return scores_of(method_of(run, name))


def alike(run: RunRecord, main: RunRecord) -> bool:
    return data(recipe(run)) == data(recipe(main)) and models_of(run) == models_of(main)


def difference(first: MethodRecord | None, second: MethodRecord | None) -> Interval | None:
    """Mean of first minus second on the report data with its 95 % interval, paired sample by sample."""
    one, two = scores_of(first), scores_of(second)
    if one is None or two is None or one.shape != two.shape:
        return None
    return interval_over_samples(one - two)


def study(name: str) -> str:
    return name.partition("-")[0]


def data(recipe: Mapping[str, Any]) -> str:
    """What was fitted and reported on: results on other data are not to be compared."""
    section = recipe["data"]
    return json.dumps({key: section.get(key) for key in ("fit", "report", "options", "split_seed")}, sort_keys=True)


def recipe(run: RunRecord) -> Mapping[str, Any]:
    value = json.loads(run.recipe)
    assert isinstance(value, dict)
    return value
