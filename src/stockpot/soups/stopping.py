"""When folds are judged, how fast they go, and when they stop: held-out data decides, for all of them together.

Every fold is judged on the samples it leaves out, after the same numbers of steps; together they leave out all, so one
mean says how all are doing. The first steps are taken at several rates, each from the start and with the same batches:
half of the rate before until one gains, then twice or half of the best until neither is better. So the given rate is
only where that search begins. From the best of these they go on, or where none gained from the start, four times as
long. Where the mean fell, faster. Where it did not, all go back to where it was lowest and try half the rate for twice
as long: the same way, with less noise. After three tries in a row that gained nothing they stop. There is no other
schedule: what needs few steps stops early, and what still gets better goes on. Everything here is a function of the
losses alone, so that processes that know them agree, and a continued run decides as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stockpot.soups.fold import Fold

EVERY, SHARE = 5, 10  # steps between two judgements: five at first, later a tenth of the steps taken
RATE, POWERS = 0.01, range(-3, 8)  # rates of the first steps: this one times these powers of two
FASTER, FASTEST = 1.5, 10.0  # how the rate grows, and how high
SLOWER, LONGER = 0.5, 2
TRIES = 3  # in a row that did not get better, each slower and longer than the one before: then folds stop


@dataclass(frozen=True)
class Verdict:
    """What follows from the losses so far."""

    best: int  # the judgement with the lowest loss
    rate: float  # from now on
    over: bool
    next: int  # steps after which folds are judged again
    again: int = 0  # steps before the last ones from the start: the batches of those come again
    restart: bool = False  # from the start, instead of from the best


def verdict(losses: Sequence[float], J: int, lr: float = RATE) -> Verdict:
    """Of the losses of judgement 0 (before the first step), 1, 2, ...; J: the most steps there are."""
    if not losses:
        return Verdict(0, lr, False, 0)
    tried, power = _searched(losses, lr)
    known = losses[: len(tried) + 1]
    best, j = known.index(min(known)), EVERY * len(tried)
    if power is not None:
        return Verdict(best, RATE * 2.0**power, False, min(J, j + EVERY), j, restart=True)
    rate, failed = RATE * 2.0 ** tried[best - 1] if best else RATE, 0
    # Where no rate gained anything in a few steps, their noise is too large: four times as many, from the start.
    every, again = (EVERY, j - EVERY) if best else (4 * EVERY, j)
    j += every
    for i, loss in enumerate(losses[len(known) :], start=len(known)):
        if loss < losses[best]:
            best, rate, failed = i, min(FASTEST, FASTER * rate), 0
        else:
            rate, failed = SLOWER * rate, failed + 1
        j += max(every, (j - again) // SHARE) * LONGER**failed
    return Verdict(best, rate, failed >= TRIES, min(J, j), again)


def _searched(losses: Sequence[float], lr: float) -> tuple[list[int], int | None]:
    """The powers of two that were tried so far, one a judgement, and which is next; None where they are enough."""
    nearest = round(math.log2(max(lr, RATE * 2.0 ** POWERS[0]) / RATE))
    power: int | None = min(nearest, POWERS[-1])
    tried: dict[int, float] = {}
    for loss in losses[1:]:
        if power is None:
            break
        tried[power] = loss
        best = min(tried, key=lambda n: (tried[n], n))
        wanted = (best + 1, best - 1) if tried[best] < losses[0] else (min(tried) - 1,)
        power = next((n for n in wanted if n in POWERS and n not in tried), None)
    return list(tried), power


def earliest(losses: Sequence[float], J: int, lr: float = RATE) -> int:
    """The steps after which it is over, if nothing gets better from now on but the first steps do."""
    found = list(losses) if len(losses) > 1 else [0.0, -1.0]  # the first steps mostly gain
    while not verdict(found, J, lr).over and verdict(found[:-1], J, lr).next < J:
        found.append(math.inf)
    return verdict(found[:-1], J, lr).next


def together(folds: Iterable[Fold]) -> list[float]:
    """The mean loss over all samples left out, at every judgement that all folds have had."""
    every = list(folds)
    sizes = [len(part) for fold in every for part in fold.held_out]
    found = []
    for losses in zip(*(fold.losses[: min(len(one.losses) for one in every)] for fold in every), strict=True):
        each = [loss for parts in losses for loss in parts]
        mean = sum(size * loss for size, loss in zip(sizes, each, strict=True)) / sum(sizes)
        found.append(mean if math.isfinite(mean) else math.inf)  # nothing is less than NaN
    return found
