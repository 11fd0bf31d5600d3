"""What two methods decided on the way: greedy about each candidate, the guard about the learned soup."""

from __future__ import annotations

from dataclasses import dataclass

from stockpot.report import words
from stockpot.report.record import Run, Score

_CHOSEN_HERE = {"learned": "start chosen here"}


@dataclass(frozen=True)
class Decision:
    """What greedy did with one candidate."""

    ingredient: str
    added: bool
    score: str


def greedy_decisions(run: Run) -> tuple[list[Decision], str]:
    method = next((m for m in run.methods if m.result.get("greedy")), None)
    if method is None:
        return [], ""
    steps = method.result["greedy"]
    decisions = [
        Decision(
            str(step.get("ingredient", "")),
            bool(step.get("added")),
            "–" if step.get("score") is None else run.metric.value(float(step["score"])),
        )
        for step in steps
    ]
    kept = sum(decision.added for decision in decisions)
    summary = (
        f"Greedy went through {words.plural(len(decisions), 'ingredient')} from the best to the worst, adding"
        f" each to the average of those before it, and kept {kept}: the others did not raise the score on the"
        " fitting data. A dash stands for a candidate that was given up early, because it could not win any more."
    )
    return decisions, summary


def guard_decision(run: Run) -> tuple[list[tuple[str, str, bool]], str]:
    method = next((m for m in run.methods if m.result.get("guard")), None)
    if method is None:
        return [], ""
    guard = method.result["guard"]
    winner = str(guard.get("winner"))
    scores = [(str(name), Score.read(value)) for name, value in (guard.get("held_out") or {}).items()]
    intervals = guard.get("intervals") or {}
    flattered = guard.get("flattered") or []
    table = [
        (
            f"{name} ({_CHOSEN_HERE.get(name, 'chosen here')})" if name in flattered else name,
            run.metric.value(score.mean) + run.metric.between(intervals.get(name)),
            name == winner,
        )
        for name, score in scores
        if score is not None
    ]
    if winner == "learned":
        summary = (
            "The guard kept the learned soup: nothing simpler did better on held-out data than chance explains. Scored"
            " here are the folds' own soups; their average is usually better than they are."
        )
    else:
        summary = (
            f"The guard stepped in: {winner} did better on held-out data than chance explains, so {method.name}"
            f" returned {winner} instead of the learned soup."
        )
    if "learned" in flattered:
        summary += (
            " Learning set out from the greedy soup, which was chosen on these very samples: both scores are too good,"
            " and alike."
        )
    elif flattered:
        summary += " The greedy soup was chosen on these very samples, so its score is too good."
    owed = guard.get("flattery")
    if owed is not None:
        amount = f"{run.metric.change(float(owed))} {run.metric.unit}".strip()
        summary += (
            " Learning set out from a greedy soup of all fitting data. What that soup owes to being scored where it was"
            f" chosen ({amount}) is taken off the learned soup's score."
        )
    return table, summary
