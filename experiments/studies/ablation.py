"""The bench for the default: candidates on pools, with common seeds, and the table of their differences.

A candidate is a method with settings and, for trying what a rule is worth, constants or functions of stockpot's own
modules that are replaced while it runs. Nothing is scored on test data: small pools have made-up dev data, and the
large zoos their dev part.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from stockpot import Pool, Task, cook
from stockpot.task import Data
from studies.pools import OTHERS, POOLS, Demo, Small

HOME = Path(__file__).resolve().parents[1]
RECIPES = ("cifar10-efficientnet", "fashion-vit", "imdb-minilm", "tiny")
OWN = ("regression", "lm-llama")  # zoos with a model.py that says what their task is
OPPONENTS = ("best", "uniform", "greedy", "learned+", "hl+", "mehl+")
DEFAULT = "default"
Row = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One way to make a soup.

    `replaced`: "module.NAME" or "module.Class.NAME" of stockpot.soups -> what stands there meanwhile.
    """

    method: str = "crossfit"
    settings: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[str, Any] = field(default_factory=dict)
    what: str = ""


@contextmanager
def replacing(values: Mapping[str, Any]) -> Iterator[None]:
    """Other constants or functions in stockpot's modules, put back afterwards."""
    before = []
    try:
        for place, value in values.items():
            name, *classes, attribute = place.split(".")
            owner = reduce(getattr, classes, importlib.import_module(f"stockpot.soups.{name}"))
            before.append((owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in reversed(before):
            setattr(owner, attribute, value)


# Pools --------------------------------------------------------------------------------------------------


def present(data: Path) -> list[str]:
    """The large zoos whose pools are there."""
    return [name for name in (*RECIPES, *OWN) if any((data / name / "pool").glob("*.safetensors"))]


def opened(name: str, seed: int, made: Path) -> tuple[Pool, Task, Data]:
    """A pool, its task, and what its soups are judged on; a small pool is made if it is not there."""
    if name in POOLS or name in OTHERS:
        small: Small | Demo = POOLS.get(name) or OTHERS[name]
        return small.opened(made / f"{small.shares or name}-{seed}", seed)
    if name in OWN:
        zoo = importlib.import_module("tasks").zoo_of(name)
        return zoo.pool(), zoo.task(seed, ()), Data.of(zoo.batch(zoo.read("dev")))
    from stockpot.recipe.build import build_pool, build_task
    from stockpot.recipe.load import load_recipe

    part = "judge" if name == "tiny" else "dev"
    recipe = load_recipe(HOME / name / "recipe.yaml", ["data.report=null"])
    dev = load_recipe(HOME / name / "recipe.yaml", [f"data.fit={part}", "data.report=null"])
    return build_pool(recipe), build_task(recipe), build_task(dev).fit


# Running ------------------------------------------------------------------------------------------------


def run(
    pools: Sequence[str], seeds: Iterable[int], candidates: Mapping[str, Candidate], results: Path, made: Path,
    told: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Every candidate on every pool with every seed; a line of the results file each, and none twice."""
    done = {(row["pool"], row["seed"], row["candidate"]) for row in read(results)}
    left = [(s, p, [c for c in candidates if (p, s, c) not in done]) for s in seeds for p in pools]
    total, count = sum(len(names) for _, _, names in left), 0
    began = time.perf_counter()
    for seed, name, names in left:
        if not names:
            continue
        pool, task, dev = opened(name, seed, made)
        for each in names:
            row = {"pool": name, "seed": seed, "candidate": each, **measured(candidates[each], pool, task, dev, seed)}
            write(results, row)
            count += 1
            rest = (time.perf_counter() - began) / count * (total - count)
            told(f"{name}, seed {seed}: {each} {row['score']:.5g}, {row['seconds']:.1f} s; {rest:.0f} s left")


def measured(candidate: Candidate, pool: Pool, task: Task, dev: Data, seed: int) -> Row:
    clock = time.process_time if task.device.type == "cpu" else time.perf_counter  # other work must not count
    with replacing(candidate.replaced):
        began = clock()
        found = cook(pool, task, candidate.method, seed=seed, **candidate.settings)
        seconds = clock() - began
    assert found.soup is not None
    found.soup.load_into(task.model)
    scores, history = task.score(dev), found.history
    return {
        "score": scores.value,
        "loss": scores.loss,
        "accuracy": task.metric.name == "accuracy",
        "held_out": None if found.held_out is None else found.held_out.value,
        "seconds": round(seconds, 2),
        "steps": sum(one.get("kind") == "step" for one in history),
        "guard": next((one["winner"] for one in history if one["kind"] == "guard"), None),
        "guarded": next((one.get("held_out") for one in history if one["kind"] == "guard"), None),
        "device": str(task.device),
        "torch": torch.__version__,
    }


def write(results: Path, row: Row) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(results: Path) -> list[Row]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


# The table ----------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], base: str = DEFAULT) -> list[str]:
    """Differences to one candidate, paired by pool and seed: points of accuracy, or per cent of the loss.

    The standard error is that over seeds. `worst` is the lowest mean of any pool, `time` the ratio of all seconds.
    """
    known = {(row["pool"], row["seed"], row["candidate"]): row for row in rows}
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    names = list(dict.fromkeys(row["candidate"] for row in rows if row["candidate"] != base))
    head = [*pools, "mean", "worst", "time", "steps"]
    lines = [f"| minus {base} | {' | '.join(head)} |", f"|---|{'---|' * len(head)}"]
    for name in [base, *names]:
        cells, means, errors, seconds, steps = [], [], [], [0.0, 0.0], [0, 0]
        for pool in pools:
            both = [
                (known[p, seed, name], known[p, seed, base])
                for p, seed, candidate in known
                if p == pool and candidate == name and (p, seed, base) in known
            ]
            if not both:
                cells.append("–")
                continue
            gaps = [gap(*pair) for pair in both]
            for place in (0, 1):
                seconds[place] += sum(pair[place]["seconds"] for pair in both)
                steps[place] += sum(pair[place]["steps"] for pair in both)
            error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
            means.append(fmean(gaps))
            errors.append(error)
            unit = "" if both[0][0]["accuracy"] else " %"
            score = fmean(pair[0]["score"] for pair in both)
            own = f"{100 * score:.2f}" if both[0][0]["accuracy"] else f"{score:.4f}"
            cells.append(f"{own} ({len(both)})" if name == base else f"{means[-1]:+.2f}{unit} ({error:.2f})")
        mean = f"{fmean(means):+.2f} ({math.hypot(*errors) / len(errors):.2f})" if means and name != base else "–"
        worst = f"{min(means):+.2f}" if means and name != base else "–"
        time_ratio = f"{seconds[0] / seconds[1]:.2f}" if seconds[1] else "–"
        lines.append(f"| {name} | {' | '.join(cells)} | {mean} | {worst} | {time_ratio} | {steps[0]} |")
    return lines


def gap(row: Row, base: Row) -> float:
    """How much better a score is: points of accuracy, or per cent of the other's loss."""
    if row["accuracy"]:
        return 100 * float(row["score"] - base["score"])
    return 100 * float((base["loss"] - row["loss"]) / base["loss"])
