"""What was asked of the default, and what was measured: yes or no, computed from the results alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stockpot.soups.registry import LEARNED
from studies.loaded import Point, Results, allowed_steps
from studies.plans import DEFAULT, PAPER, RATES
from studies.tables import interval, points

LIMIT = 0.003  # 0.3 points
MISSING = "not measured yet"


@dataclass(frozen=True)
class Claim:
    asked: str
    measured: str
    met: bool | None  # None: not measured yet

    @property
    def word(self) -> str:
        return "–" if self.met is None else "yes" if self.met else "**no**"


@dataclass(frozen=True)
class Sweep:
    """One method over the values of a setting."""

    points: list[Point]
    whole: bool  # no value that was asked for is missing

    @property
    def range(self) -> float:
        scores = [point.accuracy for point in self.points]
        return max(scores) - min(scores) if scores else 0.0


def claims(zoo: Results) -> list[Claim]:
    return [
        _seeds(zoo),
        *(_beats(zoo, other, strict=True) for other in ("greedy", "uniform")),
        *(_beats(zoo, other, strict=False) for other in ("learned+", "best")),
        _ensemble(zoo),
        _range("learning rates 0.005 to 0.05", zoo, _all_rates),
        _range("half to double the steps", zoo, _half_to_double),
        _cheaper(zoo),
    ]


def _seeds(zoo: Results) -> Claim:
    asked = "at least three seeds of every learned method"
    counts = {name: len(found["seeds"]) for name in LEARNED if (found := zoo.over_seeds(name)) is not None}
    if not counts:
        return Claim(asked, MISSING, None)
    lacking = [name for name in sorted(LEARNED) if counts.get(name, 0) < 3]
    fewest = f"{min(counts.values())} or more of {len(counts)} methods"
    return Claim(asked, fewest + (f"; fewer than three: {', '.join(lacking)}" if lacking else ""), not lacking)


def _beats(zoo: Results, other: str, *, strict: bool) -> Claim:
    asked = f"the default beats {other}" + (", the interval above zero" if strict else "")
    found = zoo.over_seeds(other)
    if found is None or "default_minus" not in found:
        return Claim(asked, MISSING, None)
    mean, low, _ = found["default_minus"]
    return Claim(asked, interval(found["default_minus"]), low > 0 if strict else mean > 0)


def _ensemble(zoo: Results) -> Claim:
    asked = "the default is within noise of the ensemble, or above it"
    found = zoo.over_seeds("ensemble")
    if found is None or "default_minus" not in found:
        return Claim(asked, MISSING, None)
    return Claim(asked, interval(found["default_minus"]), found["default_minus"][2] >= 0)


def _range(over: str, zoo: Results, of: Callable[[Results, str], Sweep]) -> Claim:
    """With values missing, a range can be too large already, but not yet small enough."""
    ours, beside = of(zoo, DEFAULT), zoo.with_curve(lambda one: of(one, PAPER).points)
    papers = of(beside, PAPER)
    asked = f"the default varies by less than {100 * LIMIT:.1f} points over {over}"
    too_large = ours.range >= LIMIT
    if not ours.whole and not too_large:
        return Claim(asked, MISSING, None)
    if len(papers.points) < 2:
        theirs = MISSING
    else:
        at_least, when = "" if papers.whole else "at least ", "" if beside is zoo else ", of an earlier time"
        theirs = f"{at_least}{points(papers.range)}{when}"
    seeds = 1 + len(ours.points[0].others)
    places = f" over {', '.join(f'{point.x:g}' for point in ours.points)}"
    size = f"{'' if ours.whole else 'at least '}{points(ours.range)} points{places}"
    of_seeds = f", mean of {seeds} seeds" if seeds > 1 else ""
    return Claim(asked, f"{size}{of_seeds}; {PAPER} beside it: {theirs}", not too_large)


def _all_rates(zoo: Results, method: str) -> Sweep:
    found = [point for point in zoo.rates(method) if RATES[0] <= point.x <= RATES[-1]]
    return Sweep(found, {point.x for point in found} >= set(RATES))


def _half_to_double(zoo: Results, method: str) -> Sweep:
    own = zoo.of_main(method)
    if own is None:
        return Sweep([], False)
    steps = allowed_steps(own)
    found = [point for point in zoo.steps(method) if 0.49 * steps <= point.x <= 2.01 * steps]
    return Sweep(found, bool(found) and found[0].x <= 0.51 * steps and found[-1].x >= 1.99 * steps)


def _cheaper(zoo: Results) -> Claim:
    """The default's gradient steps against those of the paper's best method."""
    asked = f"at most a third of {PAPER}'s gradient steps at the same accuracy or above"
    own, theirs, found = zoo.of_main(DEFAULT), zoo.of_main(PAPER), zoo.over_seeds(PAPER)
    if own is None or theirs is None or found is None or "default_minus" not in found:
        return Claim(asked, MISSING, None)
    ours = zoo.steps_of(DEFAULT)
    ratio = theirs["steps"] / ours
    counts = f"{ours:,.0f} steps on average instead of {theirs['steps']:,}, {ratio:.1f}x fewer"
    return Claim(asked, f"{counts}: {interval(found['default_minus'])}", ratio >= 3 and found["default_minus"][2] >= 0)
