"""How the ranks of torchrun or srun share what a method learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from stockpot import ranks
from stockpot.soups.settings import Settings
from stockpot.task import Task

Way = Literal["data", "folds", "alike"]
BUSY = 0.8  # share of the ranks that must be at work on average for folds to be chosen unasked
WORDS: Mapping[Way, str] = {
    "data": "each takes a part of every batch",
    "folds": "each learns whole folds",
    "alike": "each learns everything, because the loss of a batch is not that of its parts",
}


def way(settings: Settings, task: Task) -> Way:
    """How all ranks together learn one method. The task's model must hold an ingredient."""
    n, folds = ranks.size(), settings.folds
    if n == 1:
        return "data"  # all of it
    turns = -(-folds // n)  # folds that one rank learns at most
    if folds > 1 and (settings.parallel == "folds" or (settings.parallel == "auto" and folds >= BUSY * n * turns)):
        return "folds"
    return "data" if task.may_be_cut else "alike"


def owner(fold: int, how: Way) -> int:
    """The rank that learns this fold, or whose outcome counts where all of them have learned it."""
    return fold % ranks.size() if how == "folds" else 0


def described(chosen: Mapping[str, Settings], task: Task) -> str:
    """The ways of these methods, in words."""
    ways: dict[Way, list[str]] = {}
    for name, settings in chosen.items():
        ways.setdefault(way(settings, task), []).append(name)
    if not ways:
        return "scores are divided"
    if len(ways) == 1:
        return WORDS[next(iter(ways))]
    return "; ".join(f"{', '.join(names)}: {WORDS[how]}" for how, names in ways.items())
