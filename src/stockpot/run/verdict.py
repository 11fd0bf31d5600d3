"""Which soup to take, and what it is worth, in one sentence.

The choice is made without the report data: looking at it to choose would spoil what it says about the chosen one.
"""

from __future__ import annotations

from collections.abc import Mapping

from stockpot.run.records import MethodRecord
from stockpot.task import Scores
from stockpot.task.scores import worded

BASELINE = "best"


def recommended(records: Mapping[str, MethodRecord]) -> str:
    """The best on held-out data where a method has such a score (crossfit), else the best on the fitting data."""
    soups = {name: record for name, record in records.items() if "W" in record.tensors} or dict(records)
    for which in ("held_out", "fit"):
        scored = {name: r.value[which]["mean"] for name, r in soups.items() if r.value[which] is not None}
        if scored:
            return max(scored, key=lambda name: scored[name])  # the first of equals
    raise AssertionError("every record has a score on the fitting data")


def verdict(records: Mapping[str, MethodRecord], name: str, metric: str, models: int) -> str:
    record = records[name]
    which = "report" if record.reported else "fit"
    scores = record.scores(which)
    assert scores is not None
    used = record.value["models_used"]
    data = (
        "data nothing was chosen on"
        if which == "report"
        else "the data it was fitted on (no report data was given)"
    )
    if used == 1 and name != "ensemble":
        return (
            f"{name} keeps a single model of the {models}, which scores {worded(scores, metric)} on {data}:"
            " mixing did not do better here."
        )
    what = f"{name} mixes {used} of {models} models into one that scores {worded(scores, metric)} on {data}"
    baseline = records.get(BASELINE)
    if name == "ensemble":
        what = f"the ensemble of {models} models scores {worded(scores, metric)} on {data}"
    if baseline is None or name == BASELINE or baseline.reported != record.reported:
        return f"{what}."
    other = baseline.scores(which)
    assert other is not None
    return (
        f"{what}; the best single model scores {worded(other, metric)}. {_difference(scores, other, metric)}"
    )


def _difference(scores: Scores, other: Scores, metric: str) -> str:
    mean, low, high = scores.difference(other)
    interval = f"95 % interval {signed(low, metric, unit=False)} to {signed(high, metric, unit=False)}"
    if low > 0:
        return f"The gain of {signed(mean, metric)} is beyond chance ({interval})."
    if high < 0:
        return (
            f"The loss of {signed(mean, metric)} is beyond chance ({interval}): take the best single model."
        )
    if mean == 0:
        return f"There is no difference on this data ({interval})."
    return f"The difference of {signed(mean, metric)} is within chance on this much data ({interval})."


def signed(value: float, metric: str, *, unit: bool = True) -> str:
    if metric != "accuracy":
        return f"{value:+.4g}"
    return f"{100 * value:+.2f}{' points' if unit else ''}"
