"""The rounds of the search: which learners were tried when. What came of them is in docs/search.md."""

from __future__ import annotations

from typing import Any

from learners.coordinates import Eigenbasis, Grouped
from learners.problem import Problem
from learners.solve import Way

FOLDS = 4

Ideas = dict[str, tuple[Way, int]]  # name -> the learner and its number of folds


def eleventh(problem: Problem) -> Ideas:
    """The eleventh round: the same question, also at rates that are far too high."""
    del problem
    now: dict[str, Any] = {
        "retreat": True, "advance": 1.5, "evaluations": 30, "greedy": True, "slowest": 0.5**6,
    }  # fmt: skip
    changes: dict[str, dict[str, Any]] = {
        "default": {},
        "mean of iterates": {"smooth": True},
        "sharpness": {"sharpness": True},
        "halfway": {"halfway": True},
        "sharpness, halfway": {"sharpness": True, "halfway": True},
        "mean of iterates, sharpness": {"smooth": True, "sharpness": True},
        "mean of iterates, up to a 16th": {"smooth": True, "slowest": 0.5**4},
        "halfway, patient": {"halfway": True, "slowest": 0.5**10},
        "up to a 16th": {"slowest": 0.5**4},
    }
    return {
        f"{name}, {rate}": (Way(300, rate, **{**now, **change}), FOLDS)
        for rate in (0.05, 0.02, 0.5, 0.1, 0.005)
        for name, change in changes.items()
    }


def tenth(problem: Problem) -> Ideas:
    """The tenth round: what makes a rate of 0.05 or 0.1 as good as 0.02."""
    del problem
    now: dict[str, Any] = {"retreat": True, "advance": 1.5, "evaluations": 30, "greedy": True}
    changes: dict[str, dict[str, Any]] = {
        "default": {},
        "warm-up": {"warmup": 0.1},
        "a quarter first": {"pace": 0.25, "slowest": 0.5**8},
        "last moments": {"remember": "last"},
        "moments of the best": {"remember": "best"},
        "warm-up, last moments": {"warmup": 0.1, "remember": "last"},
        "judged 60 times": {"evaluations": 60},
    }
    ideas = {
        f"{name}, {rate}": (Way(300, rate, **{**now, "slowest": 0.5**6, **change}), FOLDS)
        for rate in (0.05, 0.02, 0.1)
        for name, change in changes.items()
    }
    for rate, judged in ((0.05, 75), (0.1, 150)):  # at the latest when a coefficient may have moved by 0.2
        often = {**now, "slowest": 0.5**6, "evaluations": judged}
        ideas[f"judged often, {rate}"] = (Way(300, rate, **often), FOLDS)
        ideas[f"last moments, judged often, {rate}"] = (Way(300, rate, **often, remember="last"), FOLDS)
        ideas[f"moments of the best, judged often, {rate}"] = (
            Way(300, rate, **often, remember="best"),
            FOLDS,
        )
    return ideas


def ninth(problem: Problem) -> Ideas:
    """The ninth round: what is forgotten on the way back, how often folds are judged, how long they learn.

    The seventh and the eighth had scripts of their own.
    """
    del problem
    pace: dict[str, Any] = {"lr": 0.02, "retreat": True, "advance": 1.5, "greedy": True, "slowest": 0.5**6}
    now: dict[str, Any] = {**pace, "steps": 150, "evaluations": 30, "whole": True}
    long: dict[str, Any] = {**now, "steps": 300}
    return {
        "default": (Way(**now), FOLDS),
        "judged 15 times": (Way(**{**now, "evaluations": 15}), FOLDS),
        "300 steps": (Way(**long), FOLDS),
        "moments of the best": (Way(**now, remember="best"), FOLDS),
        "last moments": (Way(**now, remember="last"), FOLDS),
        "last moments, judged 15 times": (Way(**{**now, "evaluations": 15}, remember="last"), FOLDS),
        "last moments, 300 steps": (Way(**long, remember="last"), FOLDS),
        "moments of the best, 300 steps": (Way(**long, remember="best"), FOLDS),
        "last moments, 300 steps, no schedule": (Way(**long, remember="last", constant=True), FOLDS),
        "own greedy": (Way(**{**now, "whole": False}), FOLDS),
        "own greedy, 300 steps": (Way(**{**long, "whole": False}), FOLDS),
        "own greedy, last moments, 300 steps": (Way(**{**long, "whole": False}, remember="last"), FOLDS),
    }


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


def _coarse(problem: Problem, granularity: str) -> list[int]:
    """Which group of a coarser layout each group of the fine one is in."""
    coarse = problem.kitchen.layout(granularity)
    by_group = {problem.layout.group_of[name]: coarse.group_of[name] for name in problem.layout.group_of}
    return [by_group[j] for j in range(problem.G)]


ROUNDS = {
    "first": first,
    "third": third,
    "fourth": fourth,
    "fifth": fifth,
    "sixth": sixth,
    "ninth": ninth,
    "tenth": tenth,
    "eleventh": eleventh,
}
