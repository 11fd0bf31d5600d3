"""How the ranks of torchrun or srun share what a method learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

from stockpot import ranks
from stockpot.errors import MethodError, StockpotError, TaskError
from stockpot.soups.fold import Fold, fold_states, restore_folds
from stockpot.soups.settings import Settings
from stockpot.task import Task

T = TypeVar("T")
Entry = tuple[int, int, int, int, float, float]  # of a history: kind, block, fold, step, loss, rate
Way = Literal["data", "folds", "shards", "alike"]
BUSY = 0.8  # share of the ranks that must be at work on average for folds to be chosen unasked
WORDS: Mapping[Way, str] = {
    "data": "each takes a part of every batch",
    "folds": "each learns whole folds",
    "shards": "each holds a part of the model and takes a part of every batch",
    "alike": "each learns everything, because the loss of a batch is not that of its parts",
}


def way(settings: Settings, task: Task) -> Way:
    """How all ranks together learn one method. The task's model must hold an ingredient."""
    n, folds = ranks.size(), settings.folds
    if task.sharded:
        if not task.may_be_cut:
            raise TaskError.of(
                "parallel: shards",
                expected="a loss that adds up over the parts of a batch",
                found="one that does not, as a contrastive one",
                fix="use parallel: data, with which each rank learns everything",
            )
        return "shards"
    if n == 1:
        return "data"  # all of it
    if folds > 1 and (settings.parallel == "folds" or (settings.parallel == "auto" and keeps_busy(folds, n))):
        return "folds"
    return "data" if task.may_be_cut else "alike"


def keeps_busy(folds: int, size: int) -> bool:
    """Whether so many ranks are at work on average where each learns whole folds, the slowest -(-folds // size)."""
    return folds > 1 and folds >= BUSY * size * -(-folds // size)


def shard_if_asked(chosen: Mapping[str, Settings], task: Task) -> None:
    """Divide the model among the ranks where a method's settings say so; then all methods use it divided."""
    if ranks.size() == 1:
        return
    sharding = {one.shards for one in chosen.values() if one.parallel == "shards"}
    others = {name: one.parallel for name, one in chosen.items() if one.parallel in ("data", "folds")}
    if len(sharding) > 1 or (others and (sharding or task.sharded)):
        raise MethodError.of(
            "parallel: shards",
            expected="the same for all methods: the model is divided once, unasked where it does not fit one device",
            found=", ".join(f"{way} for {name}" for name, way in others.items()) or f"shards: {sharding}",
            fix="set it for all methods alike, or cook them one by one",
        )
    wanted = next(iter(sharding), None)
    if sharding and not task.sharded:
        task.shard(wanted)
    elif wanted is not None and wanted != (held := task.shards):
        raise MethodError.of(
            "shards", f"{held}: the model is divided already", str(wanted), "leave shards out, or make the task anew"
        )


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


class Arrangement:
    """Who learns which folds of one method, and what ranks tell each other of it."""

    def __init__(self, settings: Settings, task: Task, folds: Sequence[Fold]) -> None:
        self.way = ranks.decided_once(lambda: way(settings, task))
        self._apart = self.way in ("folds", "alike")  # whether each rank computes as a process alone does
        owned = [fold for fold in folds if self._owner(fold) == ranks.own()]
        self.mine = owned if self.way == "folds" else list(folds)  # there may be more ranks than folds

    @property
    def part(self) -> int | None:
        """The number under which this rank saves what it has, where that is not what all have."""
        return ranks.own() if self.way == "folds" else None

    def _owner(self, fold: Fold) -> int:
        """The rank that learns this fold, or whose outcome counts where all of them have learned it."""
        return fold.number % ranks.size() if self.way == "folds" else 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Where each rank learns folds by itself, all know what came of every one, or why it had to stop."""
        if not self._apart:
            yield
            return
        with ranks.apart():
            try:
                yield
            except StockpotError as error:
                self.exchanged(None, error)
                raise

    def exchanged(self, mine: T, failed: StockpotError | None = None) -> list[T]:
        """What every rank has, where each learns by itself; an error of one is an error of all."""
        if not self._apart:
            return [mine]
        with ranks.meeting():
            found = ranks.gathered((mine, failed))
        for _, reason in found:
            if reason is not None and reason is not failed:
                raise reason
        return [one for one, _ in found]

    def told(self, folds: Sequence[Fold], entries: list[Entry]) -> list[Entry]:
        """Make all folds what the ranks that learned them made of them; returns the history of all."""
        owned = [fold for fold in self.mine if self._owner(fold) == ranks.own()]
        numbers = {fold.number for fold in owned}
        found = self.exchanged((fold_states(owned), [entry for entry in entries if entry[2] in numbers]))
        if len(found) == 1:
            return entries
        for (tensors, values), _ in found:
            restore_folds(folds, tensors, values)
        return [entry for _, others in found for entry in others]
