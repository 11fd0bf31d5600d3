"""Where learning sets out: from the mean of all models, a greedy soup, or the mean of the best few.

Greedy keeps what the fitting data says is better, and may end as one single lucky model; from there learning finds
little. `top` is the mean of the n ingredients with the highest scores, as many as have the lowest loss together: a soup
of several wherever averages are good, at the price of a few evaluations, and one model where they are not. Of several
starts, folds take turns, and what they learn is averaged.

A fold's top and its `own-greedy` soup are chosen without the samples it leaves out (the top only where scores are of
single samples). `greedy` is the soup of all fitting data: one search for all folds instead of one for each, and a soup
chosen on more; but the samples a fold leaves out, which say when it stops, had a say in where it began.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.events import progress
from stockpot.methods.greedy import greedy
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.settings import Settings
from stockpot.methods.state import StateStore
from stockpot.methods.track import in_turn
from stockpot.soup import weights

Start = tuple[int, ...] | None  # the mean of these ingredients; None: of all
PATIENCE = 3  # sizes in a row that do not lower the loss, before larger ones are given up


def find(
    kitchen: Kitchen,
    live: Live,
    settings: Settings,
    parts: Sequence[Tensor | None],
    store: StateStore | None,
) -> list[Start]:
    """One for each part of the fitting data (None: all of it), or as an earlier process found them."""
    saved = None if store is None else store.load()
    if saved is not None:
        return [None if start is None else tuple(start) for start in saved[1]["starts"]]
    kinds = [kind(settings, fold) for fold in range(len(parts))]
    one = greedy_members(kitchen, live, settings, None, "greedy soup") if "greedy" in kinds else None
    found: list[Start] = []
    for fold, (what, part) in enumerate(zip(kinds, parts, strict=True)):
        which = "" if part is None else f", fold {fold + 1} of {len(parts)}"
        if what == "top":
            found.append(top(kitchen, live, part, f"soups of the best{which}"))
        elif what == "own-greedy":
            found.append(greedy_members(kitchen, live, settings, part, f"greedy soup{which}"))
        else:
            found.append(one if what == "greedy" else None)
    return found


def kind(settings: Settings, fold: int) -> str:
    """Which start a fold has: the only one, or the next in turn."""
    return in_turn(settings.start, fold)


def at_greedy(settings: Settings, fold: int) -> bool:
    """Whether a fold begins at the greedy soup: then samples it leaves out had a say in where."""
    return kind(settings, fold) == "greedy"


def all_own(settings: Settings, folds: int) -> bool:
    """Whether every fold begins at a greedy soup of its own."""
    return all(kind(settings, fold) == "own-greedy" for fold in range(folds))


def top(kitchen: Kitchen, live: Live, part: Tensor | None, label: str) -> Start:
    """The n ingredients that score highest on this part of the fitting data, with n by the loss of their mean there."""
    K, G = len(kitchen.pool), len(live.layout)
    whole_batches = kitchen.individual()[0].batches is not None  # such scores belong to no part
    values = kitchen.individual_values()  # (K, N)
    own = (values if part is None or whole_batches else values[:, part]).mean(dim=1).tolist()
    ranking = kitchen.ranked(own)
    total, candidate = torch.zeros_like(live.theta), torch.empty_like(live.theta)
    best, chosen, worse, read = math.inf, 1, 0, 0
    sizes = list(_sizes(K))
    for place, n in enumerate(sizes):
        for k in ranking[read:n]:
            total.add_(live.read(k, out=candidate))
        read = n
        torch.div(total, n, out=live.theta)
        W = weights.chosen(K, G, ranking[:n])
        loss = kitchen.score_live(live, W, indices=part).loss
        progress(kitchen.listen, label, place + 1, len(sizes), "soups")
        if loss < best:
            best, chosen, worse = loss, n, 0
        else:
            worse += 1
        if worse == PATIENCE:
            break
    # Summed up in the same order wherever they stand in the pool.
    return None if chosen == K else tuple(sorted(ranking[:chosen], key=kitchen.facts.digests.__getitem__))


def _sizes(K: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, ... and K."""
    n = 1
    while n < K:
        yield n
        n = {1: 2, 2: 3}.get(n) or (n * 4 // 3 if n % 3 == 0 else n * 3 // 2)
    yield K


def greedy_members(
    kitchen: Kitchen, live: Live, settings: Settings, indices: Tensor | None, label: str
) -> tuple[int, ...]:
    """Of the greedy soup of all fitting data, or of a part."""
    ties = settings.greedy_ties
    return greedy(kitchen, live, indices=indices, ties=ties, by_content=True, label=label).chosen
