"""Look for a better learner: `python experiments/search.py ZOO [--seed N] [--only IDEA ...] [-o FILE]`.

Every idea is cross-fitted on the zoo's fitting data and judged on its dev split, which nothing was trained or fitted
on; the test data is not read. Accuracy, loss, held-out loss and gradient steps of each go into FILE, with the paired
difference to the first of them, the default when that round was made. What paid went into the product, what did not is
in docs/search.md.
"""

from __future__ import annotations

import argparse
import json
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from learners.problem import Problem, open_problem
from learners.rounds import ROUNDS
from learners.solve import Way, refit, solve
from torch import Tensor

from stockpot.recipe import load_recipe
from stockpot.recipe.build import build_task, build_train_data
from stockpot.task import Data

SHARES = (0.25, 0.5, 0.75)  # of the way from the start to what was learned
AVERAGED = [("default", "per model"), ("default", "greedy"), ("default", "from greedy")]


def attempt(
    problem: Problem, way: Way, folds: int, seed: int, greedy: Tensor
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """What is recorded of an idea, its coefficients and its scores; `greedy`: the greedy soup's scores."""
    began, taken = time.perf_counter(), problem.taken
    solved = [
        solve(problem, way, inside.to(problem.device), outside.to(problem.device), seed * 97 + f)
        for f, (inside, outside) in enumerate(problem.task.fit.folds(folds, seed))
    ]
    a = torch.stack([one.a for one in solved]).mean(dim=0)
    start = torch.stack([one.start for one in solved]).mean(dim=0)
    scores = problem.dev_scores(a)
    row = {
        "accuracy": scores.mean,
        "loss": scores.loss,
        "held_out": sum(one.held_out for one in solved) / len(solved),
        "stopped_at": [one.step for one in solved],
        "gradient_steps": problem.taken - taken,
        "seconds": round(time.perf_counter() - began, 1),
        "norm": float(a.norm()),
        "folds": sum(problem.dev_scores(one.a).mean for one in solved) / len(solved),  # each by itself
    }
    for share in SHARES:
        part = problem.dev_scores(start + share * (a - start))
        row[f"{share:g} of the way"] = [part.mean, part.loss, *_gain(part.values, greedy)]
    return row, a, scores.values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("zoo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--round", choices=ROUNDS, default="eleventh", help="first: the ideas of the first two rounds"
    )
    parser.add_argument("--only", nargs="+", help="ideas whose names match one of these, such as `from*`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dev", default="dev", metavar="PART", help="the part of the data to judge on")
    parser.add_argument(
        "--unused",
        type=int,
        metavar="N",
        help="judge on N of the training samples that no fine-tune has seen",
    )
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    here = Path(__file__).parent
    file = here / options.zoo / "recipe.yaml"
    stated = [*options.set, "data.report=null"]
    recipe = load_recipe(file, stated)
    dev = (
        dev_data(file, stated, options.dev)
        if options.unused is None
        else unused(file, stated, options.unused)
    )
    out = options.out or here / "results" / f"search-{options.zoo}-{options.seed}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    with open_problem(recipe, dev) as problem:
        best = int(problem.individual.mean(dim=1).argmax())
        simple, simple_values = _simple(problem, best), {}
        for name, a in simple.items():
            scores = problem.dev_scores(a)
            simple_values[name] = scores.values
            rows[name] = {"accuracy": scores.mean, "loss": scores.loss, "gradient_steps": 0}
            print(f"{name:32s} {100 * scores.mean:6.2f} {scores.loss:.4f}", flush=True)
        reference: Tensor | None = None
        found: dict[str, Tensor] = dict(simple)
        for name, (way, folds) in ROUNDS[options.round](problem).items():
            wanted = not options.only or any(fnmatch(name, word) for word in options.only)
            if not wanted:
                continue
            row, found[name], values = attempt(problem, way, folds, options.seed, simple_values["greedy"])
            reference = values if reference is None else reference
            _add_difference(row, values, reference)
            _add_gain(row, values, simple_values["greedy"])
            rows[name] = row
            _say(name, row)
            if name == "300 steps at 0.02":
                step = round(sum(row["stopped_at"]) / len(row["stopped_at"]))
                _refitted(problem, way, max(1, step), options.seed, rows, reference)
            _write(out, options.zoo, options.seed, rows)
        for one, other in AVERAGED:
            if {one, other} <= set(found) and reference is not None:
                scores = problem.dev_scores((found[one] + found[other]) / 2)
                row = {"accuracy": scores.mean, "loss": scores.loss, "gradient_steps": 0, "stopped_at": None}
                _add_difference(row, scores.values, reference)
                _add_gain(row, scores.values, simple_values["greedy"])
                rows[f"{one} and {other}, averaged"] = row
                _say(f"{one} and {other}, averaged", row)
        _write(out, options.zoo, options.seed, rows)


def dev_data(file: Path, stated: list[str], part: str) -> Data:
    return build_task(load_recipe(file, [*stated, f"data.fit={part}"]), report=False).fit


def unused(file: Path, stated: list[str], count: int) -> Data:
    """Of the part that fine-tuning took its samples from, some that it did not take.

    Shares of one part are cut in the order report, fit, train: what `fit` takes here is what `train` took there.
    """
    train = load_recipe(file, stated).data.train
    assert train is not None, f"{file} has no training data"
    assert train.count is not None, f"{file} trains on a share that is not a number"
    taken = f"data.fit={{of: {train.of}, count: {train.count}}}"
    rest = f"data.train={{of: {train.of}, count: {count}}}"
    return build_train_data(load_recipe(file, [*stated, taken, rest]))


def _simple(problem: Problem, best: int) -> dict[str, Tensor]:
    zero = torch.zeros_like(problem.a)
    one = zero - 1.0 / problem.K
    one[best] += 1.0
    everything = torch.arange(len(problem.task.fit))
    return {"best ingredient": one, "uniform": zero, "greedy": problem.greedy_start(everything)}


def _refitted(
    problem: Problem, way: Way, step: int, seed: int, rows: dict[str, Any], reference: Tensor
) -> None:
    taken = problem.taken
    everything = torch.arange(len(problem.task.fit), device=problem.device)
    a = refit(problem, way, everything, step, seed)
    scores = problem.dev_scores(a)
    row: dict[str, Any] = {"accuracy": scores.mean, "loss": scores.loss, "stopped_at": [step]}
    row["gradient_steps"] = problem.taken - taken
    _add_difference(row, scores.values, reference)
    rows["refitted on all data"] = row
    _say("refitted on all data", row)


def _add_difference(row: dict[str, Any], values: Tensor, reference: Tensor) -> None:
    difference = values - reference
    row["difference"] = float(difference.mean())
    row["standard_error"] = float(difference.std() / len(difference) ** 0.5)


def _add_gain(row: dict[str, Any], values: Tensor, greedy: Tensor) -> None:
    row["over_greedy"] = _gain(values, greedy)


def _gain(values: Tensor, greedy: Tensor) -> list[float]:
    """The mean difference, paired, and its standard error."""
    gain = values - greedy
    return [float(gain.mean()), float(gain.std() / len(gain) ** 0.5)]


def _say(name: str, row: dict[str, Any]) -> None:
    shares = " ".join(
        f"{100 * row[key][0]:.2f}" for share in SHARES if (key := f"{share:g} of the way") in row
    )
    gain, error = row.get("over_greedy", (float("nan"), float("nan")))
    print(
        f"{name:32s} {100 * row['accuracy']:6.2f} {row['loss']:.4f} over greedy {100 * gain:+.2f} ({100 * error:.2f})"
        f" held out {row.get('held_out', float('nan')):.4f} folds {100 * row.get('folds', float('nan')):.2f}"
        f" {100 * row['difference']:+.2f} ({100 * row['standard_error']:.2f}) steps {row['gradient_steps']}"
        f" stopped {row['stopped_at']} {row.get('seconds', '')} s, part of the way {shares}",
        flush=True,
    )


def _write(out: Path, zoo: str, seed: int, rows: dict[str, Any]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    value = {"zoo": zoo, "seed": seed, "device": device, "torch": torch.__version__, "ideas": rows}
    out.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
