"""Which of several ideas for the default is best: tries on the dev splits of all zoos, taken together.

A try called IDEA-SEED, with that seed, is one seed of an idea. Gains over another idea are paired sample by sample and
counted over samples and seeds; the zoos count alike, whatever their sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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


def gains(home: Path, zoos: Sequence[str], against: str, say: Callable[[str], None] = print) -> list[Gain]:
    """Best first; only ideas that every zoo has, with the same seeds as the other; `say` is told of the rest."""
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
    every = dict.fromkeys(idea for ideas in found.values() for idea in ideas if idea != against)
    whole = [
        idea for idea in every if all(_alike(ideas.get(idea, {}), ideas[against]) for ideas in found.values())
    ]
    for idea in every:
        if idea not in whole:
            say(f"{idea}: left out, not tried with the seeds and data of {against} on every zoo")
    return sorted(
        (_gain(idea, {zoo: (ideas[idea], ideas[against]) for zoo, ideas in found.items()}) for idea in whole),
        key=lambda gain: -gain.over_all[0],
    )


def _gain(idea: str, pairs: Mapping[str, tuple[Seeds, Seeds]]) -> Gain:
    by_zoo: dict[str, intervals.Interval] = {}
    losses = []
    for zoo, (own, other) in pairs.items():
        differences = [own[seed].values["report"] - other[seed].values["report"] for seed in sorted(own)]
        batches = next(iter(own.values())).result["report"].get("batches")
        by_zoo[zoo] = intervals.over_seeds(np.stack(differences), batches)
        mine, theirs = (sum(_loss(one) for one in seeds.values()) for seeds in (own, other))
        losses.append(1 - mine / theirs)
    return Gain(idea, by_zoo, sum(losses) / len(losses))


def _alike(own: Seeds, other: Seeds) -> bool:
    """The same seeds, and for each as many samples."""
    return set(own) == set(other) and all(
        own[seed].values["report"].shape == other[seed].values["report"].shape for seed in own
    )


def _loss(method: Method) -> float:
    return float(method.result["report"]["loss"])


def _ideas(runs: Path) -> dict[str, dict[str, Method]]:
    ideas: dict[str, dict[str, Method]] = {}
    for file in sorted(runs.glob(f"{TRY}-*/run.json")):
        idea, _, seed = file.parent.name.removeprefix(f"{TRY}-").rpartition("-")
        run = read(file.parent)
        method = run.method(DEFAULT)
        if not idea or str(run.about.get("seed")) != seed:
            continue  # called otherwise: a try of another kind
        if run.about.get("status") == "done" and method is not None and "report" in method.values:
            ideas.setdefault(idea, {})[seed] = method
    return ideas
