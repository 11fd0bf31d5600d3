"""What the bench tries: the default, its opponents, and the default with one rule changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from studies.ablation import DEFAULT, OPPONENTS, Candidate


def _all(problem: Any, *_: Any) -> tuple[int, ...]:
    return tuple(range(len(problem.pool)))


def _last(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value.clone() for name, value in saved.items()}


def _one(folds: Sequence[Any], simplex: bool) -> Any:
    from stockpot.soups.fold import average

    return average(folds[:1], simplex)


def _whatever(learner: Any, engine: Any) -> Any:  # noqa: ARG001
    return learner.folds


def _no_winner(known: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    return {"winner": "learned"}


_NEVER = {
    "stopping.POWERS": range(1),
    "stopping.FASTER": 1.0,
    "stopping.SLOWER": 1.0,
    "stopping.LONGER": 1,
    "stopping.TRIES": 10**9,
}

CANDIDATES: dict[str, Candidate] = {
    DEFAULT: Candidate(),
    **{name: Candidate(name) for name in OPPONENTS},
    "from all": Candidate(replaced={"crossfit.best_start": _all}),
    "the given rate, not searched": Candidate(replaced={"stopping.POWERS": range(1)}),
    "not raised after the search": Candidate(replaced={"stopping.FASTER": 1.0}),
    "first judged after ten steps": Candidate(replaced={"stopping.EVERY": 10}),
    "two tries": Candidate(replaced={"stopping.TRIES": 2}),
    "four tries": Candidate(replaced={"stopping.TRIES": 4}),
    "300 steps, neither paced nor stopped": Candidate(settings={"steps": 300}, replaced=_NEVER),
    "judged every five steps": Candidate(replaced={"stopping.SHARE": 10**9}),
    "tries not longer": Candidate(replaced={"stopping.LONGER": 1}),
    "last step judged": Candidate(replaced={"judging.with_mean": _last}),
    "one fold": Candidate(replaced={"crossfit.average": _one}),
    "averaged whatever": Candidate(replaced={"judging.FoldLearner._to_be_averaged": _whatever}),
    "two folds": Candidate(settings={"folds": 2}),
    "three folds": Candidate(settings={"folds": 3}),
    "eight folds": Candidate(settings={"folds": 8}),
    "no guard": Candidate(replaced={"crossfit.guard_record": _no_winner}),
    **{f"rate {rate:g}": Candidate(settings={"lr": rate}) for rate in (0.002, 0.005, 0.05, 0.1)},
    **{f"{steps:,} steps": Candidate(settings={"steps": steps}) for steps in (500, 4000)},
}
