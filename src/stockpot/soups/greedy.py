"""Greedy soup: add ingredients in the order of their own score while the soup gets better.

The running sum of the chosen models stays in memory, so each candidate is read once. A candidate is dropped as soon
as even perfect scores on all remaining samples could not make it win; the samples most likely to fail come first, so
that this happens early. The chosen set is exactly that of the plain algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.events import Event, progress
from stockpot.soup import weights
from stockpot.soups.kitchen import Kitchen


@dataclass(frozen=True)
class GreedySoup:
    chosen: tuple[int, ...]  # in the order they were added
    W: Tensor  # (K, G)
    evaluated: int  # samples evaluated after the first stage
    history: tuple[dict[str, object], ...]


def greedy(
    kitchen: Kitchen,
    live: Live,
    *,
    indices: Tensor | None = None,
    ties: bool = False,
    early: bool = True,
    by_content: bool = False,
    calibration: int | None = None,
    label: str = "greedy soup",
) -> GreedySoup:
    """Choose on `indices` of the fitting data (default: all). `early=False` is the plain algorithm, for tests.

    Order: by own score, highest first; equal scores in the pool's order or, `by_content`, in that of the digests, so
    that a permuted pool gives the same soup. A candidate stays when the score rises (with `ties`: does not fall).
    `calibration`: samples that a candidate's running statistics are estimated from, at most (default: all).
    """
    K, G = len(kitchen.pool), len(live.layout)
    everything = torch.arange(len(kitchen.task.fit)) if indices is None else indices  # (n,)
    values = kitchen.individual_values()[:, everything]  # (K, n)
    own = values.mean(dim=1).tolist()
    ranking = kitchen.ranked(own) if by_content else sorted(range(K), key=lambda k: -own[k])
    chosen = [ranking[0]]
    current = values[ranking[0]]  # (n,) scores of the soup so far
    history: list[dict[str, object]] = [
        _decision(kitchen, ranking[0], True, float(current.mean()), len(current))
    ]
    total = live.read(ranking[0], out=torch.empty_like(live.theta))  # (P,) sum of the chosen
    candidate = torch.empty_like(total)
    evaluated = 0
    ceiling = kitchen.task.metric_max if early else None
    for position, k in enumerate(ranking[1:], start=2):
        live.read(k, out=candidate).add_(total)
        torch.div(candidate, len(chosen) + 1, out=live.theta)
        W = weights.chosen(K, G, [*chosen, k])
        # Likely failures first: what the soup gets wrong now, then what most ingredients get wrong. Where nothing
        # can be given up early, the plain order: sums, and metrics of whole batches, depend on it.
        order = (
            torch.argsort(current + values.mean(dim=0) / 2, stable=True)
            if ceiling is not None
            else torch.arange(len(current))
        )
        stop = None if ceiling is None else _hopeless(ceiling, len(current), float(current.sum()), ties)
        scores = kitchen.score_live(
            live, W, calibration=calibration, indices=everything[order], stop=stop, with_loss=False
        )
        evaluated += scores.n
        better = scores.complete and _wins(float(scores.values.sum()), float(current.sum()), ties)
        history.append(_decision(kitchen, k, better, scores.mean if scores.complete else None, scores.n))
        kitchen.listen(Event("greedy", history[-1]))
        progress(kitchen.listen, label, position, K, "models")
        if better:
            chosen.append(k)
            total.copy_(candidate)
            current = torch.empty_like(current).index_copy_(0, order, scores.values)
    return GreedySoup(tuple(chosen), weights.chosen(K, G, chosen), evaluated, tuple(history))


def _wins(score: float, best: float, ties: bool) -> bool:
    return score >= best if ties else score > best


def _hopeless(ceiling: float, n: int, best: float, ties: bool) -> Callable[[float, int], bool]:
    return lambda score, done: not _wins(score + ceiling * (n - done), best, ties)


def _decision(
    kitchen: Kitchen, k: int, added: bool, score: float | None, evaluated: int
) -> dict[str, object]:
    return {
        "kind": "greedy",
        "ingredient": kitchen.pool.names[k],
        "index": k,
        "added": added,
        "score": score,  # None: given up before the end
        "evaluated": evaluated,
    }
