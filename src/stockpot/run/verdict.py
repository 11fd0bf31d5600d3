"""Which soup to take, and what it is worth, in words.

The choice is made on held-out data: samples that each method was scored on by coefficients that were not fitted on
them. Scores on the fitting data flatter whatever learned most, and the report data must not be chosen on. Methods have
a held-out score where they learn by folds; crossfit's guard also gives one to the best single model and
the plain average, and has chosen between those and what was learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stockpot.run.record import KINDS, encode
from stockpot.run.shapes import plain
from stockpot.soup import Soup
from stockpot.soups.result import Result
from stockpot.task import Metric, Scores
from stockpot.task.checks import REPORT
from stockpot.task.scores import worded

BASELINE = "best"
_USE = "Use it"


def held_out(results: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """The held-out score of every soup that has a finite one, with its interval."""
    found: dict[str, Any] = {}
    for guard in (entry for one in results.values() for entry in one.history if entry["kind"] == "guard"):
        for name, value in guard["held_out"].items():
            if name != "learned":  # here the guard's own method, not the one of that name
                low, high = guard["intervals"][name]
                found[name] = {"value": value, "low": low, "high": high}
    found |= {name: encode(one.held_out) for name, one in results.items() if one.held_out is not None}
    soups = [
        name for name, one in results.items() if one.soup is not None and found.get(name, {}).get("value") is not None
    ]
    return {name: {key: found[name][key] for key in ("value", "low", "high")} for name in soups}


def recommended(evidence: Mapping[str, Mapping[str, Any]], results: Mapping[str, Result]) -> str | None:
    """The best on held-out data, and of equals the last, which mixes more; None where there is no such score.

    What a guard has compared its method with is not taken for a higher score: the method's soup is that one already
    where it is better beyond chance, and otherwise the average of folds, of which each alone was scored.
    """
    guards = [entry for one in results.values() for entry in one.history if entry["kind"] == "guard"]
    beaten = {name for guard in guards for name in guard["held_out"] if name != "learned"}
    left = [name for name in evidence if name not in beaten]
    return max(reversed(left), key=lambda name: float(evidence[name]["value"]), default=None)


def compared_on(results: Mapping[str, Result]) -> str | None:
    """The most honest data that all methods were scored on: scores on different data must not be compared."""
    every = [kind for kind in KINDS if all(getattr(one, kind) is not None for one in results.values())]
    return every[0] if every and results else None


def differences(results: Mapping[str, Result], kind: str | None) -> dict[str, dict[str, list[float | None]]]:
    """Each method against the best single model, sample by sample: difference, low, high by set of data. A method that
    chose that very model differs by nothing, and no chance is in it."""
    if kind is None or BASELINE not in results:
        return {}
    every = {name: one.reports if kind == "report" else {kind: getattr(one, kind)} for name, one in results.items()}
    base, best = every.pop(BASELINE), results[BASELINE].soup
    same = {name for name in every if _one_model(results[name].soup) == _one_model(best) is not None}
    return {
        name: {
            part: [0.0] * 3 if name in same else plain(scores.difference(base[part])) for part, scores in sets.items()
        }
        for name, sets in every.items()
    }


def _one_model(soup: Soup | None) -> int | None:
    """The ingredient that a soup consists of, if it is one alone."""
    if soup is None:
        return None
    first = int(soup.W[:, 0].argmax())
    return first if bool((soup.W[first] == 1).all()) else None


def advised(verdict: str) -> bool:
    """Whether a verdict says to use the soup."""
    return verdict.startswith(_USE)


def verdict(results: Mapping[str, Result], name: str | None, ingredients: Sequence[str]) -> str:
    """First line: what to do. Second: why, by the first set of report data, and what happened on the others."""
    if name is None:
        return (
            "No method is recommended.\n"
            "None of them was scored on samples that it was not fitted on, and scores on the fitting data flatter. Add"
            " crossfit, or learn with folds of 2 or more."
        )
    chosen, base, K = results[name], results.get(BASELINE), len(ingredients)
    sets = _scored(chosen)
    first, *others = sets
    scores = sets[first]
    data = "the data it was fitted on (no report data was given)" if first == "fit" else _called(first)
    said = f"scores {worded(scores)} on {data}"
    soup = chosen.soup
    if soup is not None and chosen.models_used == 1:
        kept = ingredients[int(soup.W[:, 0].argmax())]
        return f"No gain from mixing: keep {kept}.\n{name} keeps that single model of the {K}, which {said}."
    mixes = f"averages the outputs of {K} models and" if soup is None else f"mixes {chosen.models_used} of {K} models;"
    what = f"{name} {mixes} {said}"
    if base is None or base.soup is None or name == BASELINE:
        return f"Not known whether to use it: it was compared with nothing.\n{what}."
    best = ingredients[int(base.soup.W[:, 0].argmax())]
    known = _scored(base)
    why = [f"{what}; the best single model, {best}, scores {worded(known[first])}."]
    found = {part: scores.difference(known[part]) for part, scores in sets.items() if part in known}
    metrics = {part: one.metric for part, one in sets.items()}
    why[0] += f" {_difference(metrics[first], *found[first])}"
    forgot = [part for part, (_, _, high) in found.items() if part != first and high < 0]
    for part in others:
        if part in known:
            verb = "It forgot: on" if part in forgot else "On"
            why.append(f"{verb} {part} it scores {worded(sets[part])}, {best} {worded(known[part])}.")
            why.append(_difference(metrics[part], *found[part]))
    gap, low, high = found[first]
    if math.isnan(gap):
        decision = "Not known whether to use it: there is no score to compare."
    elif first == "fit":
        decision = f"Not known whether to use it: give report data, or keep {best}."
    elif low > 0:
        lost = ", ".join(f"{_signed(metrics[part], found[part][0])} on {part}" for part in forgot)
        but = f", but it forgot: {lost}" if forgot else ""
        decision = f"{_USE}: {name} gains {_signed(metrics[first], found[first][0])} beyond chance{but}."
    else:
        decision = f"A loss beyond chance: keep {best}." if high < 0 else f"No gain beyond chance: keep {best}."
    return f"{decision}\n{' '.join(why)}"


def _scored(result: Result) -> dict[str, Scores]:
    """On every set of report data, or on the fitting data where there is none."""
    assert result.fit is not None
    return dict(result.reports) or {"fit": result.fit}


def _called(part: str) -> str:
    return "data nothing was chosen on" + ("" if part == REPORT else f" ({part})")


def _signed(metric: Metric, number: float, unit: bool = True) -> str:
    shown = f"{100 * number:+.2f}" if metric.percent else f"{number:+.4g}"
    name = "points" if metric.percent else metric.unit
    return f"{shown} {name}" if unit and name else shown


def _difference(metric: Metric, value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return "So nothing is known of their difference."
    interval = f"95 % interval {_signed(metric, low, False)} to {_signed(metric, high, False)}"
    amount = _signed(metric, value)
    if low > 0:
        return f"The gain of {amount} is beyond chance ({interval})."
    if high < 0:
        return f"The loss of {amount} is beyond chance ({interval})."
    if value == 0:
        return f"There is no difference on this data ({interval})."
    return f"The difference of {amount} is within chance on this much data ({interval})."
