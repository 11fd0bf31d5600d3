"""Look for a better learner: `python experiments/search.py ZOO [--seed N] [--only IDEA ...] [-o FILE]`.

Every idea is cross-fitted on the zoo's fitting data and judged on its dev split, which nothing was trained or fitted
on; the test data is not read. Accuracy, loss, held-out loss and gradient steps of each go into FILE, with the paired
difference to the first of them, the default when that round was made. What paid went into the product, what did not is
in docs/decisions.md.
"""

from __future__ import annotations

import argparse
import json
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from learners.coordinates import Eigenbasis, Grouped
from learners.problem import Problem, open_problem
from learners.solve import Way, refit, solve
from torch import Tensor

from stockpot.recipe import load_recipe
from stockpot.recipe.build import build_task, build_train_data
from stockpot.task import Data

FOLDS = 4
SHARES = (0.25, 0.5, 0.75)  # of the way from the start to what was learned
AVERAGED = [("default", "per model"), ("default", "greedy"), ("default", "from greedy")]


Ideas = dict[str, tuple[Way, int]]  # name -> the learner and its number of folds


def sixth(problem: Problem) -> Ideas:
    """The sixth round: targets that are partly the pool's own predictions, augmented images, and both."""
    del problem
    pace: dict[str, Any] = {"retreat": True, "advance": 1.5, "greedy": True, "whole": True}
    now: dict[str, Any] = {"steps": 150, "lr": 0.02, **pace}
    slow: dict[str, Any] = {**now, "lr": 0.01}
    taught: dict[str, Any] = {"teacher": "ensemble", "share": 0.5}
    return {
        "default": (Way(**now), FOLDS),
        "rate 0.01": (Way(**slow), FOLDS),
        "ensemble 0.3": (Way(**now, teacher="ensemble", share=0.3), FOLDS),
        "ensemble 0.5": (Way(**now, **taught), FOLDS),
        "ensemble 0.7": (Way(**now, teacher="ensemble", share=0.7), FOLDS),
        "ensemble 0.9": (Way(**now, teacher="ensemble", share=0.9), FOLDS),
        "ensemble 0.5, rate 0.01": (Way(**slow, **taught), FOLDS),
        "greedy 0.3": (Way(**now, teacher="greedy", share=0.3), FOLDS),
        "greedy 0.5": (Way(**now, teacher="greedy", share=0.5), FOLDS),
        "augmentation 0.25": (Way(**now, augmentation=0.25), FOLDS),
        "augmentation 0.5": (Way(**now, augmentation=0.5), FOLDS),
        "augmentation 0.5, 300 steps": (Way(**{**now, "steps": 300}, augmentation=0.5), FOLDS),
        "ensemble 0.5, augmentation 0.25": (Way(**now, **taught, augmentation=0.25), FOLDS),
        "shared 0.02": (Way(**now, shared=True), FOLDS),
        "shared 0.05": (Way(**{**now, "lr": 0.05}, shared=True), FOLDS),
        "shared 0.1": (Way(**{**now, "lr": 0.1}, shared=True), FOLDS),
        "shared 0.02, batches of 512": (Way(**now, shared=True, batch=512), FOLDS),
        "smoothing 0.2": (Way(**now, smoothing=0.2), FOLDS),
        "smoothing 0.2, rate 0.01": (Way(**slow, smoothing=0.2), FOLDS),
    }


def fifth(problem: Problem) -> Ideas:
    """The fifth round, on experiments/tiny: lower rates, where folds begin, more folds, smoother labels."""
    modules = Grouped(_coarse(problem, "module"), problem.device)
    one = Grouped([0] * problem.G, problem.device)
    pace: dict[str, Any] = {"retreat": True, "advance": 1.5, "greedy": True}
    now: dict[str, Any] = {"steps": 150, "lr": 0.01, **pace}
    whole: dict[str, Any] = {**now, "whole": True}
    model_first = Way(75, 0.02, coordinates=one, **pace)
    return {
        "default": (Way(150, 0.02, **pace), FOLDS),
        "rate 0.01": (Way(**now), FOLDS),
        "rate 0.005": (Way(**{**now, "lr": 0.005}), FOLDS),
        "rate 0.002": (Way(**{**now, "lr": 0.002}), FOLDS),
        "300 steps": (Way(**{**now, "steps": 300}), FOLDS),
        "8 folds": (Way(**now), 8),
        "8 folds of 75": (Way(**{**now, "steps": 75}), 8),
        "batches of 256": (Way(**now, batch=256), FOLDS),
        "rate 0.02, smooth": (Way(150, 0.02, **pace, smooth=True), FOLDS),
        "calibrated": (Way(**now, temperature=True, calibrated=True), FOLDS),
        "from the mean": (Way(**{**now, "greedy": False}), FOLDS),
        "per model, rate 0.02": (Way(150, 0.02, **pace, coordinates=one), FOLDS),
        "per module": (Way(**now, coordinates=modules), FOLDS),
        "per model, then per tensor": (
            Way(**{**now, "steps": 75, "greedy": False}, first=model_first),
            FOLDS,
        ),
        "smoothing 0.1": (Way(**now, smoothing=0.1), FOLDS),
        "whole": (Way(**whole), FOLDS),
        "whole, rate 0.02": (Way(**{**whole, "lr": 0.02}), FOLDS),
        "whole, rate 0.005": (Way(**{**whole, "lr": 0.005}), FOLDS),
        "whole, 300 steps": (Way(**{**whole, "steps": 300}), FOLDS),
        "whole, 8 folds": (Way(**whole), 8),
        "whole, smoothing 0.1": (Way(**whole, smoothing=0.1), FOLDS),
        "whole, smoothing 0.2": (Way(**whole, smoothing=0.2), FOLDS),
        "whole, smoothing 0.3": (Way(**whole, smoothing=0.3), FOLDS),
        "whole, smoothing 0.5": (Way(**whole, smoothing=0.5), FOLDS),
    }


def fourth(problem: Problem) -> Ideas:
    """The fourth round: folds that set out from their own greedy soups."""
    modules = Grouped(_coarse(problem, "module"), problem.device)
    whole = Grouped([0] * problem.G, problem.device)
    now: dict[str, Any] = {"steps": 100, "lr": 0.02, "retreat": True, "advance": 1.5}
    greedy: dict[str, Any] = {**now, "greedy": True}
    return {
        "default": (Way(**now), FOLDS),
        "from greedy": (Way(**greedy), FOLDS),
        "8 folds of 80": (Way(**{**now, "steps": 80}), 8),
        "from greedy, batches of 256": (Way(**greedy, batch=256), FOLDS),
        "from greedy, per module": (Way(**greedy, coordinates=modules), FOLDS),
        "from greedy, per model": (Way(**greedy, coordinates=whole), FOLDS),
        "from greedy, rate 0.005": (Way(**{**greedy, "lr": 0.005}), FOLDS),
        "from greedy, rate 0.05": (Way(**{**greedy, "lr": 0.05}), FOLDS),
        "from greedy, 50 steps": (Way(**{**greedy, "steps": 50}), FOLDS),
        "from greedy, 200 steps": (Way(**{**greedy, "steps": 200}), FOLDS),
        "from greedy, smooth": (Way(**greedy, smooth=True), FOLDS),
        "from greedy, calibrated": (Way(**greedy, temperature=True, calibrated=True), FOLDS),
    }


def third(problem: Problem) -> Ideas:
    """The third round: what goes by the pace of held-out loss, with 5,000 samples to fit (2,900 on imdb-minilm)."""
    modules = Grouped(_coarse(problem, "module"), problem.device)
    whole = Grouped([0] * problem.G, problem.device)
    pace: dict[str, Any] = {"retreat": True, "advance": 1.5}
    now: dict[str, Any] = {"steps": 100, "lr": 0.02, **pace}
    model_first = Way(steps=40, lr=0.02, coordinates=whole, **pace)
    return {
        "default": (Way(**now), FOLDS),
        "calibrated": (Way(**now, temperature=True, calibrated=True), FOLDS),
        "calibrated, from greedy": (Way(**now, temperature=True, calibrated=True, greedy=True), FOLDS),
        "calibrated, per model": (Way(**now, temperature=True, calibrated=True, coordinates=whole), FOLDS),
        "calibrated, rate 0.005": (Way(**{**now, "lr": 0.005}, temperature=True, calibrated=True), FOLDS),
        "calibrated, rate 0.05": (Way(**{**now, "lr": 0.05}, temperature=True, calibrated=True), FOLDS),
        "calibrated, 200 steps": (Way(**{**now, "steps": 200}, temperature=True, calibrated=True), FOLDS),
        "from greedy": (Way(**now, greedy=True), FOLDS),
        "rate 0.005": (Way(**{**now, "lr": 0.005}), FOLDS),
        "rate 0.01": (Way(**{**now, "lr": 0.01}), FOLDS),
        "rate 0.05": (Way(**{**now, "lr": 0.05}), FOLDS),
        "50 steps": (Way(**{**now, "steps": 50}), FOLDS),
        "200 steps": (Way(**{**now, "steps": 200}), FOLDS),
        "400 steps": (Way(**{**now, "steps": 400}), FOLDS),
        "no advance": (Way(**{**now, "advance": 1.0}), FOLDS),
        "no advance, rate 0.005": (Way(**{**now, "advance": 1.0, "lr": 0.005}), FOLDS),
        "no advance, rate 0.05": (Way(**{**now, "advance": 1.0, "lr": 0.05}), FOLDS),
        "no advance, no retreat": (Way(steps=100, lr=0.02), FOLDS),
        "advance 1.25": (Way(**{**now, "advance": 1.25}), FOLDS),
        "per model": (Way(**now, coordinates=whole), FOLDS),
        "per module": (Way(**now, coordinates=modules), FOLDS),
        "per model, then per tensor": (Way(**{**now, "steps": 60}, first=model_first), FOLDS),
        "with 8 folds": (Way(**now), 8),
        "with 8 folds, 50 steps": (Way(**{**now, "steps": 50}), 8),
        "with 8 folds, 50 steps, rate 0.005": (Way(**{**now, "steps": 50, "lr": 0.005}), 8),
        "with 8 folds, 50 steps, rate 0.05": (Way(**{**now, "steps": 50, "lr": 0.05}), 8),
        "with 8 folds, 50 steps, smooth": (Way(**{**now, "steps": 50}, smooth=True), 8),
        "with 16 folds, 50 steps": (Way(**{**now, "steps": 50}), 16),
        "smooth": (Way(**now, smooth=True), FOLDS),
        "smooth, advance 1.25": (Way(**{**now, "advance": 1.25}, smooth=True), FOLDS),
        "batches of 256": (Way(**now, batch=256), FOLDS),
        "batches of 512": (Way(**now, batch=512), FOLDS),
        "one second moment for all": (Way(**now, shared=True), FOLDS),
        "with temperature": (Way(**now, temperature=True), FOLDS),
        "with weight penalty 0.1": (Way(**now, penalty=0.1), FOLDS),
    }


def first(problem: Problem) -> Ideas:
    """The first two rounds, with 2,000 samples to fit."""
    modules = Grouped(_coarse(problem, "module"), problem.device)
    whole = Grouped([0] * problem.G, problem.device)
    eigen = Eigenbasis(problem.gram)
    short: dict[str, Any] = {"steps": 300, "lr": 0.02}
    return {
        "1000 steps at 0.01": (Way(steps=1000, lr=0.01), FOLDS),
        "1000 steps at 0.05": (Way(steps=1000, lr=0.05), FOLDS),
        "300 steps at 0.02": (Way(**short), FOLDS),
        "300 steps at 0.05": (Way(steps=300, lr=0.05), FOLDS),
        "100 steps at 0.05": (Way(steps=100, lr=0.05), FOLDS),
        "100 steps at 0.02": (Way(steps=100, lr=0.02), FOLDS),
        "100 steps at 0.01": (Way(steps=100, lr=0.01), FOLDS),
        "100 steps at 0.005": (Way(steps=100, lr=0.005), FOLDS),
        "300 steps at 0.005": (Way(steps=300, lr=0.005), FOLDS),
        "300 steps at 0.002": (Way(steps=300, lr=0.002), FOLDS),
        "100 steps at 0.005, 8 folds": (Way(steps=100, lr=0.005), 8),
        "100 steps at 0.005 from greedy": (Way(steps=100, lr=0.005, greedy=True), FOLDS),
        "100 steps at 0.02 per model": (Way(steps=100, lr=0.02, coordinates=whole), FOLDS),
        "100 steps at 0.005 per module": (Way(steps=100, lr=0.005, coordinates=modules), FOLDS),
        "2 folds": (Way(**short), 2),
        "8 folds": (Way(**short), 8),
        "one coefficient per module": (Way(**short, coordinates=modules), FOLDS),
        "one coefficient per model": (Way(**short, coordinates=whole), FOLDS),
        "eigenbasis": (Way(**short, coordinates=eigen), FOLDS),
        "eigenbasis, 100 steps": (Way(steps=100, lr=0.02, coordinates=eigen), FOLDS),
        "weight penalty 0.01": (Way(**short, penalty=0.01), FOLDS),
        "weight penalty 0.1": (Way(**short, penalty=0.1), FOLDS),
        "averaged iterates": (Way(**short, average=True), FOLDS),
        "averaged iterates, 0.05": (Way(steps=300, lr=0.05, average=True), FOLDS),
        "start from greedy": (Way(**short, greedy=True), FOLDS),
        "temperature": (Way(**short, temperature=True), FOLDS),
        "blocks of 18, random": (Way(**short, block=min(18, problem.K // 2)), FOLDS),
        "blocks of 18, by gradient": (Way(**short, block=min(18, problem.K // 2), chosen_blocks=True), FOLDS),
        "L-BFGS": (Way(steps=20, lbfgs=True), FOLDS),
        "L-BFGS, eigenbasis": (Way(steps=20, lbfgs=True, coordinates=eigen), FOLDS),
        "L-BFGS, penalty 0.01": (Way(steps=20, lbfgs=True, penalty=0.01), FOLDS),
    }


ROUNDS = {"first": first, "third": third, "fourth": fourth, "fifth": fifth, "sixth": sixth}


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
        "--round", choices=ROUNDS, default="sixth", help="first: the ideas of the first two rounds"
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
        f" held out {row.get('held_out', float('nan')):.4f}"
        f" {100 * row['difference']:+.2f} ({100 * row['standard_error']:.2f}) steps {row['gradient_steps']}"
        f" stopped {row['stopped_at']} {row.get('seconds', '')} s, part of the way {shares}",
        flush=True,
    )


def _write(out: Path, zoo: str, seed: int, rows: dict[str, Any]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    value = {"zoo": zoo, "seed": seed, "device": device, "torch": torch.__version__, "ideas": rows}
    out.write_text(json.dumps(value, indent=1) + "\n")


def _coarse(problem: Problem, granularity: str) -> list[int]:
    """Which group of a coarser layout each group of the fine one is in."""
    coarse = problem.kitchen.layout(granularity)
    by_group = {problem.layout.group_of[name]: coarse.group_of[name] for name in problem.layout.group_of}
    return [by_group[j] for j in range(problem.G)]


if __name__ == "__main__":
    main()
