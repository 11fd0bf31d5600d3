"""The guard of cross-fitting: does something simpler do better on held-out data than chance explains?

Scores on fitting data flatter whatever was chosen there, so all have to be flattered alike, or not at all:

- The uniform soup chose nothing; the best individual is chosen anew without the samples it is scored on.
- A fold has not learned from the samples it is scored on. But where it set out from the greedy soup of all fitting
  data, they had a say in that. Against that greedy soup, scored on all fitting data as well, this is fair: both owe it
  the same. Against the others it is not, and is taken off: the greedy soup's scores there, minus those of greedy soups
  that are chosen without the samples they are scored on. That takes a search for every fold, so it is done only where
  it could change the decision.
- A fold that set out from the mean owes nothing. Then the greedy soup of all fitting data is flattered more than it;
  only where it wins even so, it is asked again with one search for every fold.
- Where every fold set out from its own greedy soup, these are what it is compared with: nobody owes anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.soup import weights
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.settings_before import Settings
from stockpot.soups.starts import greedy_members
from stockpot.soups.visit import finite
from stockpot.task import Scores

Folds = list[tuple[Tensor, Tensor]]  # places inside and outside


@dataclass(frozen=True)
class Decision:
    known: Mapping[str, Scores]  # what was compared, each sample by sample
    flattered: tuple[str, ...] = ()  # who was chosen on the samples it is scored on, at least in part
    flattery: float | None = None  # taken off the learned soup's mean score

    @cached_property
    def record(self) -> dict[str, Any]:
        return {**judged(self.known), "flattered": list(self.flattered), "flattery": self.flattery}

    @property
    def winner(self) -> str:
        """`learned`, or what did better."""
        return str(self.record["winner"])


def decide(
    kitchen: Kitchen,
    live: Live,
    settings: Settings,
    learned: Scores,
    members: tuple[int, ...],
    folds: Folds,
) -> Decision:
    """`learned`: each sample scored by the fold that left it out; `members`: of the greedy soup of all fitting data."""
    known = {"learned": learned, **simple(kitchen, live, folds)}
    live.theta.copy_(live.mean(list(members)))
    W = weights.chosen(len(kitchen.pool), len(live.layout), members)
    chosen_here = kitchen.score_live(live, W, with_loss=False).values  # (N,)
    known["greedy"] = Scores(chosen_here)
    if settings.start == "greedy":
        if not could_change(known, len(kitchen.pool)):
            return Decision(known, flattered=("learned", "greedy"))
        without = cross_fitted_greedy(kitchen, live, settings, folds)
        owed = chosen_here - without  # (N,)
        known["learned"], known["greedy"] = Scores(learned.values - owed), Scores(without)
        return Decision(known, flattery=float(owed.mean()))
    decision = Decision(known, flattered=("greedy",))
    if decision.winner != "greedy":
        return decision
    return Decision({**known, "greedy": Scores(cross_fitted_greedy(kitchen, live, settings, folds))})


def decide_by_own(
    kitchen: Kitchen, live: Live, learned: Scores, own: Sequence[tuple[int, ...]], folds: Folds
) -> Decision:
    """Where every fold set out from its own greedy soup, which was chosen without what the fold leaves out."""
    greedy = Scores(elsewhere(kitchen, live, own, folds))
    return Decision({"learned": learned, **simple(kitchen, live, folds), "greedy": greedy})


def judged(known: Mapping[str, Scores]) -> dict[str, Any]:
    """Who wins between `learned` and the others, all scored on the same samples, and by how much.

    Each of the others is another chance to be ahead by luck, so they share the 5 % (Bonferroni).
    """
    over = {
        name: known[name].difference(known["learned"], _confidence(known))
        for name in known
        if name != "learned"
    }
    better = [name for name, (_, low, _) in over.items() if low > 0]  # beyond chance
    return {
        "held_out": {name: one.mean for name, one in known.items()},
        "intervals": {name: [finite(end) for end in one.interval()] for name, one in known.items()},
        "over_learned": {name: [finite(x) for x in found] for name, found in over.items()},
        "winner": max(better, key=lambda name: known[name].mean, default="learned"),
    }


def could_change(known: Mapping[str, Scores], models: int) -> bool:
    """Whether taking off what learned soups owe to where they began could let the best individual or uniform win.

    The best of K equal soups looks better than it is by at most sqrt(2 ln K) standard errors on average; one more for
    luck beyond that.
    """
    luck = math.sqrt(2 * math.log(models)) + 1
    for name in ("best", "uniform"):
        _, low, _ = known[name].difference(known["learned"], _confidence(known))
        error = Scores(known[name].values - known["learned"].values).standard_error
        if low + luck * error > 0:
            return True
    return False


def _confidence(known: Mapping[str, Scores]) -> float:
    return 1 - 0.05 / (len(known) - 1)


def simple(kitchen: Kitchen, live: Live, folds: Folds) -> dict[str, Scores]:
    """Held-out scores of the uniform soup and of the best individual, chosen without the samples it is scored on."""
    K, G = len(kitchen.pool), len(live.layout)
    own = kitchen.individual_values()  # (K, N)
    live.theta.copy_(live.mean(listen=kitchen.listen))
    uniform = kitchen.score_live(live, weights.uniform(K, G), with_loss=False).values
    best = torch.empty(own.shape[1], dtype=torch.float64)
    for inside, outside in folds:
        best[outside] = own[kitchen.first(own[:, inside].mean(dim=1).tolist()), outside]
    return {"best": Scores(best), "uniform": Scores(uniform)}


def cross_fitted_greedy(kitchen: Kitchen, live: Live, settings: Settings, folds: Folds) -> Tensor:
    """Each sample scored by a greedy soup that was chosen without it. (N,)"""
    found = [
        greedy_members(kitchen, live, settings, inside, f"greedy soup {number + 1} of {len(folds)}")
        for number, (inside, _) in enumerate(folds)
    ]
    return elsewhere(kitchen, live, found, folds)


def elsewhere(kitchen: Kitchen, live: Live, soups: Sequence[tuple[int, ...]], folds: Folds) -> Tensor:
    """Each sample scored by the soup of the fold that left it out. (N,)"""
    K, G = len(kitchen.pool), len(live.layout)
    values = torch.empty(len(kitchen.task.fit), dtype=torch.float64)
    for chosen, (_, outside) in zip(soups, folds, strict=True):
        live.theta.copy_(live.mean(list(chosen)))
        W = weights.chosen(K, G, chosen)
        values[outside] = kitchen.score_live(live, W, indices=outside, with_loss=False).values
    return values
