"""What the bench tries: the default, its opponents, and the default with one rule changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from studies.ablation import DEFAULT, OPPONENTS, Candidate


def _keep_all(folds: Any, losses: Any, loss_together: float) -> Any:  # noqa: ARG001
    return folds, {"kept": "all"}, ()


def _no_winner(known: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    return {"winner": "learned"}


CANDIDATES: dict[str, Candidate] = {
    DEFAULT: Candidate(),
    **{name: Candidate(name) for name in OPPONENTS},
    "no guard": Candidate(replaced={"crossfit.judged": _no_winner}),
    "no hill check": Candidate(replaced={"crossfit.without_hill": _keep_all}),
    "pace never raised": Candidate(replaced={"learn.FASTER": 1.0}),
    "give up never": Candidate(replaced={"learn.SLOWEST": 0.0}),
    "1,000 steps": Candidate(settings={"steps": 1000}),
}
