"""Which soup to take, and what it is worth, in one sentence.

The choice is made on held-out data: samples that each method was scored on by coefficients that were not
fitted on them. Scores on the fitting data flatter whatever learned most, and the report data must not be
chosen on. Methods have a held-out score where they learn by folds; crossfit's guard also gives one to the
best single model, the plain average and the greedy soup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stockpot.run.record import KINDS, MethodRecord
from stockpot.run.shapes import plain

if TYPE_CHECKING:
    from stockpot.task import Metric, Scores

BASELINE = "best"


def held_out(records: Mapping[str, MethodRecord]) -> dict[str, dict[str, Any]]:
    """The held-out score of every soup that has a finite one, with its interval."""
    found: dict[str, dict[str, Any]] = {}
    for record in records.values():
        guard = record.result["guard"]
        for name, value in guard["held_out"].items() if guard is not None else ():
            if name in records and name != "learned":  # here the guard's own method, not the one of that name
                low, high = guard["intervals"][name]
                found[name] = {"value": value, "low": low, "high": high}
    for name, record in records.items():
        if record.result["held_out"] is not None:
            found[name] = {key: record.result["held_out"][key] for key in ("value", "low", "high")}
    soups = [name for name, record in records.items() if record.W is not None]
    return {name: found[name] for name in soups if name in found and found[name]["value"] is not None}


def recommended(evidence: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The best on held-out data, and of equals the last, which mixes more; None where there is no such score."""
    best = max((score["value"] for score in evidence.values()), default=math.nan)
    return next((name for name in reversed(list(evidence)) if evidence[name]["value"] == best), None)


def compared_on(records: Mapping[str, MethodRecord]) -> str | None:
    """The most honest data that all methods were scored on: scores on different data must not be compared."""
    for kind in KINDS:
        if records and all(record.result[kind] is not None for record in records.values()):
            return kind
    return None


def differences(
    records: Mapping[str, MethodRecord], kind: str | None, metric: Metric
) -> dict[str, list[float | None]]:
    """Each method against the best single model, sample by sample: difference, low, high."""
    base = records[BASELINE].scores(kind, metric) if BASELINE in records and kind is not None else None
    found = {}
    for name, record in records.items():
        scores = None if base is None or kind is None or name == BASELINE else record.scores(kind, metric)
        if base is not None and scores is not None:
            found[name] = [plain(x) for x in scores.difference(base)]
    return found


def verdict(records: Mapping[str, MethodRecord], name: str | None, metric: Metric, models: int) -> str:
    from stockpot.task.scores import worded

    if name is None:
        return (
            "No method is recommended: none of them was scored on samples that it was not fitted on, and scores on the"
            " fitting data flatter. Add crossfit, or learn with folds of 2 or more."
        )
    record = records[name]
    which = "report" if record.reported else "fit"
    scores = record.scores(which, metric)
    assert scores is not None
    used = record.result["models_used"]
    data = (
        "data nothing was chosen on"
        if which == "report"
        else "the data it was fitted on (no report data was given)"
    )
    if used == 1 and name != "ensemble":
        return (
            f"{name} keeps a single model of the {models}, which scores {worded(scores)} on {data}:"
            " mixing did not do better here."
        )
    what = f"{name} mixes {used} of {models} models into one that scores {worded(scores)} on {data}"
    if name == "ensemble":
        what = f"the ensemble of {models} models scores {worded(scores)} on {data}"
    other = records[BASELINE].scores(which, metric) if BASELINE in records and name != BASELINE else None
    if other is None:
        return f"{what}."
    return f"{what}; the best single model scores {worded(other)}. {_difference(scores, other)}"


def _difference(scores: Scores, other: Scores) -> str:
    value, low, high = scores.difference(other)
    percent = scores.metric.percent
    interval = f"95 % interval {signed(low, percent, unit=False)} to {signed(high, percent, unit=False)}"
    if low > 0:
        return f"The gain of {signed(value, percent)} is beyond chance ({interval})."
    if high < 0:
        return (
            f"The loss of {signed(value, percent)} is beyond chance ({interval}): take the best single model."
        )
    if value == 0:
        return f"There is no difference on this data ({interval})."
    return f"The difference of {signed(value, percent)} is within chance on this much data ({interval})."


def signed(value: float, percent: bool, *, unit: bool = True) -> str:
    if not percent:
        return f"{value:+.4g}"
    return f"{100 * value:+.2f}{' points' if unit else ''}"
