"""Which of several ideas for the default is best: tries on the dev splits of all zoos, taken together.

A try called IDEA-SEED is one seed of an idea. Gains over another idea are paired sample by sample and counted over
samples and seeds; the zoos count alike, whatever their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stockpot.errors import RunError, describe
from stockpot.report.record import Method, read
from studies import intervals
from studies.plans import DEFAULT, TRY

Seeds = Mapping[str, Method]  # by seed


@dataclass(frozen=True)
class Gain:
    """Of an idea over another, on the zoos that have both."""

    idea: str
    by_zoo: Mapping[str, intervals.Interval]
    loss: float  # how much lower the dev loss is, mean over zoos, in shares of the other's

    @property
    def over_all(self) -> intervals.Interval:
        mean = sum(one[0] for one in self.by_zoo.values()) / len(self.by_zoo)
        variance = sum(intervals.standard_error(one) ** 2 for one in self.by_zoo.values())
        half = intervals.Z * math.sqrt(variance) / len(self.by_zoo)
        return mean, mean - half, mean + half


def gains(home: Path, zoos: Sequence[str], against: str) -> list[Gain]:
    """Best first; only ideas that every zoo has, with the same seeds as the other."""
    found = {zoo: _ideas(home / "runs" / zoo) for zoo in zoos}
    for zoo, ideas in found.items():
        if against not in ideas:
            raise RunError(
                describe(
                    f"--against {against}",
                    expected=f"an idea that was tried on {zoo}: {', '.join(sorted(ideas)) or 'none'}",
                    found="none of that name",
                    fix="choose one of these, or try it there (study.py --try NAME-SEED ...)",
                )
            )
    whole = [
        idea
        for idea in found[zoos[0]]
        if idea != against
        and all(set(ideas.get(idea, {})) == set(ideas[against]) for ideas in found.values())
    ]
    return sorted(
        (_gain(idea, {zoo: (ideas[idea], ideas[against]) for zoo, ideas in found.items()}) for idea in whole),
        key=lambda gain: -gain.over_all[0],
    )


def _gain(idea: str, pairs: Mapping[str, tuple[Seeds, Seeds]]) -> Gain:
    by_zoo: dict[str, intervals.Interval] = {}
    losses = []
    for zoo, (own, other) in pairs.items():
        differences = [own[seed].values["report"] - other[seed].values["report"] for seed in sorted(own)]
        by_zoo[zoo] = intervals.over_seeds(np.stack(differences))
        mine, theirs = (sum(_loss(one) for one in seeds.values()) for seeds in (own, other))
        losses.append(1 - mine / theirs)
    return Gain(idea, by_zoo, sum(losses) / len(losses))


def _loss(method: Method) -> float:
    return float(method.result["report"]["loss"])


def _ideas(runs: Path) -> dict[str, dict[str, Method]]:
    ideas: dict[str, dict[str, Method]] = {}
    for file in sorted(runs.glob(f"{TRY}-*/run.json")):
        idea, _, seed = file.parent.name.removeprefix(f"{TRY}-").rpartition("-")
        run = read(file.parent)
        method = run.method(DEFAULT)
        if run.about.get("status") == "done" and method is not None and "report" in method.values:
            ideas.setdefault(idea, {})[seed] = method
    return ideas
