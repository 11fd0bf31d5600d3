"""What folds may do in turn: where each sets out, and whether a model moves as a whole.

A soup is linear in its coefficients, so folds that went different ways can be averaged like any others. Every kind of
fold is learned for every part of the data once; what a mixture of kinds would give is then an average away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.methods import starts
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.learn import Learner
from stockpot.methods.setting_checks import StartName
from stockpot.methods.settings import Settings
from stockpot.methods.track import Track


@dataclass(frozen=True)
class Kind:
    """How a fold learns."""

    start: StartName
    coarse: float


# Small letters: every tensor for itself; capitals: a model as a whole.
KINDS: Mapping[str, Kind] = {
    "g": Kind("greedy", 0.0),
    "o": Kind("own-greedy", 0.0),
    "t": Kind("top", 0.0),
    "m": Kind("mean", 0.0),
    "G": Kind("greedy", 1.0),
    "T": Kind("top", 1.0),
    "M": Kind("mean", 1.0),
}
# Which kinds take turns, in any order.
MIXTURES = (
    "g", "o", "t", "m", "G", "T", "M",
    "go", "ot", "om", "gt", "gm", "gM", "gT", "gG", "tm", "tM", "tT", "mM",
    "gtM", "gmM", "gtmM", "gtMM", "ggtM", "ggmM", "gtmT",
)  # fmt: skip


def fold_weights(
    kitchen: Kitchen, live: Live, settings: Settings, kind: Kind, members: tuple[int, ...]
) -> Tensor:
    """The mixing weights every fold ends with, (F, K, G); `members`: of the greedy soup of all fitting data."""
    chosen = dataclasses.replace(settings, start=kind.start, coarse=kind.coarse)
    data = kitchen.task.fit
    folds = data.folds(chosen.folds, chosen.seed)
    begins: list[starts.Start] = [members] * len(folds)  # one search serves all kinds that set out from there
    if kind.start != "greedy":
        begins = starts.find(kitchen, live, chosen, [inside for inside, _ in folds], None)
    tracks = [
        Track(number, data.subset(inside), data.subset(outside), begins[number])
        for number, (inside, outside) in enumerate(folds)
    ]
    Learner(live, chosen, tracks).run()
    return torch.stack([track.W for track in tracks])


def turns(mixture: str, folds: int) -> Iterator[str]:
    """Which kind every fold is, for every beginning of the round: as many ways as kinds, if they are different."""
    seen = set()
    for first in range(len(mixture)):
        one = "".join(mixture[(first + fold) % len(mixture)] for fold in range(folds))
        if one not in seen:
            seen.add(one)
            yield one


def mixed(found: Mapping[str, Tensor], kinds: Sequence[str]) -> Tensor:
    """The soup of folds that were of these kinds. (K, G)"""
    return torch.stack([found[kind][fold] for fold, kind in enumerate(kinds)]).mean(dim=0)
