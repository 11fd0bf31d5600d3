"""Zoos that `tasks.py` cooks: scores of samples in nats per token, accuracy or R2, their intervals, and the tables.

A sample's score is chosen so that their mean is the metric: minus its nats per token (all sequences are equally long),
100 or 0 for a right or wrong class, or one minus its squared error over the variance of the targets, which is taken as
known. Where samples belong to texts, the text is what is drawn at random: an interval is over sums of texts, not over
sequences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stockpot.soups.result import Result
from stockpot.soups.settings import as_json
from stockpot.task import Scores

Numbers = NDArray[np.float64]
METHODS = ("best", "uniform", "greedy", "learned+", "hl+", "mehl+", "crossfit")
DEFAULT = "crossfit"
SETS = ("report", "second", "dev")
SHOWN = SETS[:2]
PERCENT = ("accuracy in %",)
ABOUT = (
    "[lm-llama](../experiments/lm-llama/): a language model trained here on film reviews, then fine-tuned to"
    " presidents' speeches, whole or with LoRA adapters. [imdb-lora](../experiments/imdb-lora/): a sentence encoder"
    " with LoRA adapters, for the sentiment of reviews. [regression](../experiments/regression/): prices of diamonds,"
    " first of the best cut, then of the other cuts. A seed is another draw of the fitting data and another seed of"
    " learning. A second column of scores is what was learned first: how much each soup has forgotten. Intervals are"
    " over speeches and reviews, or diamonds, and over seeds; where the table says dev, test data is still closed."
)
LOWER = ("nats per token",)  # metrics shown without the minus that makes more of them better


def by_sample(scores: Scores) -> Numbers:
    """(n,), whose mean is the metric: higher is better."""
    if scores.metric.name == "accuracy":
        return np.asarray(100 * scores.table.numpy()[:, 0])
    first, second = scores.table.numpy().T
    if scores.metric.name == "r2":  # prediction and target
        return np.asarray(1 - (first - second) ** 2 / second.var())
    return np.asarray(-first / second)  # summed loss and tokens


def facts(result: Result) -> dict[str, Any]:
    history = result.history
    return {
        "settings": as_json(result.settings),
        "seconds": round(result.seconds, 2),
        "models_used": result.models_used,
        "fit": None if result.fit is None else result.fit.value,
        "held_out": None if result.held_out is None else result.held_out.value,
        "guard": next((one.get("winner") for one in history if one.get("kind") == "guard"), None),
        "steps": sum(one.get("kind") == "step" for one in history),
        "notes": list(result.notes),
        "peak_device": result.peak_device,
        "peak_host": result.peak_host,
    }


def by_unit(values: Numbers, units: Numbers | None) -> Numbers:
    """(S, n) of samples into (S, G) of the texts they belong to, with the same mean.

    Texts differ in length, so the mean over all is a ratio; a text's value is that mean and its own departure from it.
    """
    if units is None:
        return values
    _, group = np.unique(units, return_inverse=True)
    count = group.max() + 1
    mean = values.mean(axis=1, keepdims=True)
    sums = np.stack([np.bincount(group, row, count) for row in values - mean])
    return np.asarray(mean + sums * count / values.shape[1])


def gathered(folder: Path, zoo: str) -> dict[str, Any]:
    """All runs of a zoo: by name (`main`, or a trial on dev) over their seeds."""
    runs: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("*.json")):
        name, _, seed = path.stem.rpartition("-")
        runs.setdefault(name, {})[int(seed)] = path
    found = {name: _over_seeds([paths[seed] for seed in sorted(paths)]) for name, paths in runs.items()}
    return {"format": 1, "zoo": zoo, "runs": found}


def _over_seeds(paths: Sequence[Path]) -> dict[str, Any]:
    seeds = [json.loads(path.read_text("utf-8")) for path in paths]
    arrays = [dict(np.load(path.with_suffix(".npz"))) for path in paths]
    common = [name for name in seeds[0]["methods"] if all(name in one["methods"] for one in seeds)]
    names = sorted(common, key=lambda name: METHODS.index(name) if name in METHODS else len(METHODS))
    sets = [which for which in SETS if which in seeds[0]["parts"]]
    methods = {
        name: {**{which: _of(name, which, arrays) for which in sets}, "each": [one["methods"][name] for one in seeds]}
        for name in names
    }
    about = ("metric", "parts", "models", "parameters", "fitted", "commit", "machine", "torch", "made")
    return {
        **{key: seeds[0][key] for key in about},
        "seeds": [one["seed"] for one in seeds],
        "commands": [one["command"] for one in seeds],
        "failed": [one["failed"] for one in seeds],
        "base": {which: _of("base", which, arrays) for which in sets},
        "methods": methods,
    }


def _of(name: str, which: str, arrays: Sequence[Mapping[str, Numbers]]) -> dict[str, Any]:
    from studies.paired import interval_over_seeds  # needs what recipes need, which cooking does not

    units = arrays[0].get(f"units/{which}")
    values = np.stack([one[f"{name}/{which}"] for one in arrays]).astype(np.float64)  # (S, n)
    found: dict[str, Any] = {
        "value": _rounded(interval_over_seeds(by_unit(values, units))),
        "by_seed": _rounded(values.mean(axis=1)),
        "n": values.shape[1],
        "units": values.shape[1] if units is None else len(np.unique(units)),
    }
    if name != DEFAULT and all(f"{DEFAULT}/{which}" in one for one in arrays):
        ours = np.stack([one[f"{DEFAULT}/{which}"] for one in arrays]).astype(np.float64)
        found["default_minus"] = _rounded(interval_over_seeds(by_unit(ours - values, units)))
    return found


def _rounded(values: Sequence[float] | Numbers) -> list[float]:
    return [float(f"{value:.7g}") for value in values]


# The page ------------------------------------------------------------------------------------------------


def read_gathered(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]


def section(gathered: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table for each zoo; of its runs on dev where test data is still closed."""
    from studies.tables import table

    lines = ["## Language models, adapters and regression", "", ABOUT, ""]
    for zoo in gathered:
        run = zoo["runs"].get("main") or zoo["runs"]["dev"]
        sign = -1 if run["metric"] in LOWER else 1
        digits = 2 if run["metric"] in PERCENT else 5
        count, part = len(run["seeds"]), run["parts"]["report"]
        shown = [run["parts"][which] for which in SHOWN if which in run["parts"]]
        heads = [f"{zoo['zoo']}: {run['metric']}"]
        for name in shown:
            heads += [name, f"{DEFAULT} minus it"]
        heads.append("seconds")
        rows = [["before fine-tuning", *_cells(run["base"], sign, digits), "–"]]
        for name, method in run["methods"].items():
            seconds = sum(one["seconds"] for one in method["each"]) / count
            title = f"**{name}**" if name == DEFAULT else name
            rows.append([title, *_cells(method, sign, digits), f"{seconds:.1f}"])
        lines += table(heads, rows)
        better = "lower is better" if sign < 0 else "higher is better"
        n, units = (run["base"]["report"][key] for key in ("n", "units"))
        units = "" if units == n else f" in {units} texts"
        lines += [
            f"{better.capitalize()}. K = {run['models']}, {run['parameters']:,} parameters; fitted on"
            f" {run['fitted']:,} samples, {part}: {n:,}{units}; {count} seed{'s' * (count > 1)}."
            f" {run['machine']}, torch {run['torch']}, commit {run['commit']}, {run['made']}:"
            f" `{' '.join(run['commands'][0])}`.",
            "",
        ]  # fmt: skip
    return lines


def _cells(found: Mapping[str, Any], sign: int, digits: int) -> list[str]:
    cells = []
    for which in SHOWN:
        if which not in found:
            continue
        difference = found[which].get("default_minus")
        shown = "–"
        if difference is not None:
            mean, *ends = (sign * value for value in difference)
            low, high = sorted(ends)
            shown = f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]".replace("-", "−")
        cells += [f"{sign * found[which]['value'][0]:.{digits}f}", shown]
    return cells
