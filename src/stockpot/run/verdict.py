"""Which soup to take, and what it is worth, in one sentence.

The choice is made on held-out data: samples that each method was scored on by coefficients that were not fitted on
them. Scores on the fitting data flatter whatever learned most, and the report data must not be chosen on. Methods have
a held-out score where they learn by folds; crossfit's guard also gives one to the best single model, the plain average
and the greedy soup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stockpot.run.record import KINDS, encode
from stockpot.run.shapes import plain
from stockpot.soups.result import Result
from stockpot.task import Scores
from stockpot.task.scores import worded

BASELINE = "best"


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


def recommended(evidence: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The best on held-out data, and of equals the last, which mixes more; None where there is no such score."""
    return max(reversed(list(evidence)), key=lambda name: float(evidence[name]["value"]), default=None)


def compared_on(results: Mapping[str, Result]) -> str | None:
    """The most honest data that all methods were scored on: scores on different data must not be compared."""
    every = [kind for kind in KINDS if all(getattr(one, kind) is not None for one in results.values())]
    return every[0] if every and results else None


def differences(results: Mapping[str, Result], kind: str | None) -> dict[str, dict[str, list[float | None]]]:
    """Each method against the best single model, sample by sample: difference, low, high by set of data."""
    if kind is None or BASELINE not in results:
        return {}
    every = {name: one.reports if kind == "report" else {kind: getattr(one, kind)} for name, one in results.items()}
    base = every.pop(BASELINE)
    return {
        name: {part: plain(scores.difference(base[part])) for part, scores in sets.items()}
        for name, sets in every.items()
    }


def verdict(results: Mapping[str, Result], name: str | None, models: int) -> str:
    if name is None:
        return (
            "No method is recommended: none of them was scored on samples that it was not fitted on, and scores on the"
            " fitting data flatter. Add crossfit, or learn with folds of 2 or more."
        )
    chosen = results[name]
    kind = "report" if chosen.report is not None else "fit"
    scores = getattr(chosen, kind)
    data = "data nothing was chosen on"
    if kind == "fit":
        data = "the data it was fitted on (no report data was given)"
    said = f"scores {worded(scores)} on {data}"
    if name == "ensemble":
        what = f"the ensemble of {models} models {said}"
    elif chosen.models_used == 1:
        return f"{name} keeps a single model of the {models}, which {said}: mixing did not do better here."
    else:
        what = f"{name} mixes {chosen.models_used} of {models} models into one that {said}"
    base = getattr(results[BASELINE], kind) if BASELINE in results and name != BASELINE else None
    if base is None:
        return f"{what}."
    said = f"{what}; the best single model scores {worded(base)}. {_difference(scores, base)}"
    # What it gained on one set it may have lost on another: said as plainly.
    for part, other in chosen.reports.items():
        if kind == "report" and part != kind:
            mine, best = worded(other), worded(results[BASELINE].reports[part])
            said += f" On {part} it scores {mine}, the best single model {best}."
            said += f" {_difference(other, results[BASELINE].reports[part], advice=False)}"
    return said


def _difference(scores: Scores, other: Scores, *, advice: bool = True) -> str:
    value, low, high = scores.difference(other)
    percent = scores.metric.percent

    def signed(number: float) -> str:
        return f"{100 * number:+.2f}" if percent else f"{number:+.4g}"

    interval = f"95 % interval {signed(low)} to {signed(high)}"
    amount = f"{signed(value)} points" if percent else signed(value)
    if low > 0:
        return f"The gain of {amount} is beyond chance ({interval})."
    if high < 0:
        take = ": take the best single model" if advice else ""
        return f"The loss of {amount} is beyond chance ({interval}){take}."
    if value == 0:
        return f"There is no difference on this data ({interval})."
    return f"The difference of {amount} is within chance on this much data ({interval})."
