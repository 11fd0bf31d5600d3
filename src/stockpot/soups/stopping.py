"""When folds are judged, how fast they go, and when they stop: held-out data decides, for all of them together.

Every fold is judged on the samples it leaves out, after the same numbers of steps; together they leave out all, so one
mean says how all are doing. Where it fell, all go on faster. Where it did not, all go back to where it was lowest and
try half the pace for twice as long: the same way, with less noise. After three tries in a row that gained nothing they
stop. There is no other schedule: what needs few steps stops early, and what still gets better goes on, whatever the
rate. Everything here is a function of the losses alone, so that processes that know them agree, and a continued run
decides as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stockpot.soups.fold import Fold

EVERY, SHARE = 10, 10  # steps between two judgements: ten at first, later a tenth of the steps taken
FASTER, FASTEST = 1.5, 2.0**10  # of the rate
SLOWER, LONGER = 0.5, 2
TRIES = 3  # in a row that did not get better, each slower and longer than the one before: then folds stop


@dataclass(frozen=True)
class Verdict:
    """What follows from the losses so far."""

    best: int  # the judgement with the lowest loss
    pace: float  # factor on the rate from now on
    over: bool
    next: int  # steps after which folds are judged again


def verdict(losses: Sequence[float], J: int) -> Verdict:
    """Of the losses of judgement 0 (before the first step), 1, 2, ...; J: the most steps there are."""
    best, pace, j, failed = 0, 1.0, 0, 0
    for i, loss in enumerate(losses):
        if i and loss < losses[best]:
            best, pace, failed = i, min(FASTEST, FASTER * pace), 0
        elif i:
            pace, failed = SLOWER * pace, failed + 1
        j += max(EVERY, j // SHARE) * LONGER**failed
    return Verdict(best, pace, failed >= TRIES, min(J, j))


def earliest(losses: Sequence[float], J: int) -> int:
    """The steps after which it is over, if nothing gets better from now on."""
    found = list(losses) or [0.0]
    while not verdict(found, J).over and verdict(found[:-1], J).next < J:
        found.append(math.inf)
    return verdict(found[:-1], J).next


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
