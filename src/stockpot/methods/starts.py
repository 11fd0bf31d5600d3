"""Where learning sets out: from the mean of all models, the greedy soup, or the mean of the leaders.

Greedy keeps what the fitting data says is better, and may end as one single lucky model; from there learning finds
little. The leaders are all ingredients that the fitting data cannot tell from the best one: their mean is a soup of
several, at the risk that some do not mix well. `turns` lets the folds alternate between both, and averages what they
learn.

A fold's leaders are chosen without the samples it leaves out (unless scores are of whole batches), from the
ingredients' own scores. The greedy soup is that of all fitting data: one chosen on a part of it is a worse place to
begin, and each search costs K evaluations more.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stockpot.engine import Live
from stockpot.methods.greedy import greedy
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.settings import Settings
from stockpot.methods.state import StateStore
from stockpot.task import Scores

Start = tuple[int, ...] | None  # the mean of these ingredients; None: of all
CHANCE = 0.05  # at most: that the one which is truly best is left out


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
    if settings.start == "mean":
        return [None] * len(parts)
    from_greedy = [at_greedy(settings, fold) for fold in range(len(parts))]
    one = greedy_members(kitchen, live, settings, None, "greedy soup") if any(from_greedy) else None
    return [one if own else leaders(kitchen, part) for own, part in zip(from_greedy, parts, strict=True)]


def at_greedy(settings: Settings, fold: int) -> bool:
    """Whether a fold begins at the greedy soup: then samples it leaves out had a say in where."""
    return settings.start == "greedy" or (settings.start == "turns" and fold % 2 == 0)


def leaders(kitchen: Kitchen, part: Tensor | None) -> Start:
    """All ingredients that are not worse than the best one beyond chance, on this part of the fitting data.

    One that is as good as others may be ahead of each by luck, so the comparisons share one error rate.
    """
    scores = kitchen.individual()
    if part is not None and scores[0].batches is None:  # scores of whole batches belong to no part
        scores = [Scores(one.values[part]) for one in scores]
    K = len(scores)
    best = kitchen.first([one.mean for one in scores])
    confidence = 1 - 2 * CHANCE / K  # only one side of an interval is looked at
    found = tuple(k for k in range(K) if k == best or scores[k].difference(scores[best], confidence)[2] >= 0)
    return None if len(found) == K else tuple(sorted(found, key=kitchen.facts.digests.__getitem__))


def greedy_members(
    kitchen: Kitchen, live: Live, settings: Settings, indices: Tensor | None, label: str
) -> tuple[int, ...]:
    """Of the greedy soup of all fitting data, or of a part."""
    ties = settings.greedy_ties
    return greedy(kitchen, live, indices=indices, ties=ties, by_content=True, label=label).chosen
