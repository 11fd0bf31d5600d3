"""When folds are judged, how fast they go, and when they stop: held-out data decides, for all of them together.

Every fold is judged on the samples it leaves out, after the same numbers of steps; together they leave out all, so one
mean says how all are doing. Where it fell, all go on faster. Where it did not, all go back to where it was lowest, at
half the pace, and at a quarter of the rate they stop. There is no other schedule: what needs few steps stops early,
and what still gets better goes on. Everything here is a function of the losses alone, so that processes that know them
agree, and a continued run decides as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stockpot.soups.fold import Fold

EVERY = 10  # steps between two judgements at first; later a tenth of the steps taken
FASTER, SLOWER = 1.5, 0.5
SLOWEST, FASTEST = (0.25, 2.0**10)  # of the rate: folds stop at the first, and go no faster than the second


@dataclass(frozen=True)
class Verdict:
    """What follows from the losses so far."""

    best: int  # the judgement with the lowest loss
    pace: float  # factor on the rate from now on
    over: bool


def verdict(losses: Sequence[float]) -> Verdict:
    """Of the losses of judgement 0 (before the first step), 1, 2, ..."""
    best, pace = 0, 1.0
    for i, loss in enumerate(losses[1:], start=1):
        if loss < losses[best]:
            best, pace = i, min(FASTEST, FASTER * pace)
        else:
            pace *= SLOWER
    return Verdict(best, pace, pace <= SLOWEST)


def next_judgement(j: int, J: int) -> int:
    """The number of steps after which folds are judged next, j being that of now and J the most there are."""
    return min(J, j + max(EVERY, j // 10))


def together(folds: Iterable[Fold], without: Fold | None = None) -> list[float]:
    """The mean loss over all samples left out, at every judgement that all folds have had; or over others' samples.

    A fold alone has no others, and is believed itself.
    """
    every = list(folds)
    some = [fold for fold in every if fold is not without] or every
    sizes = [len(fold.held_out) for fold in some if fold.held_out is not None]
    found = []
    for losses in zip(*(fold.losses[: min(len(one.losses) for one in every)] for fold in some), strict=True):
        mean = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)
        found.append(mean if math.isfinite(mean) else math.inf)  # nothing is less than NaN
    return found
