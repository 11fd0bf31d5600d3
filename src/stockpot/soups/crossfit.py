"""Cross-fitting: learn once per fold, stop all folds together, average the mixing weights, and guard the result.

1. All folds set out from the mean of all ingredients, or of the best half, quarter, ... where that is better beyond
   chance on samples that had no say in which those are.
2. Every fold learns without the samples it leaves out; those of all folds together say how fast to go and when to stop
   (soups/stopping.py), and what is judged is the mean of the latest steps.
3. The soup is the average of the folds' soups, or the best of them where they are too far apart to be averaged.
4. The guard scores every fold's own soup on what that fold left out, each half with the soup that was best on the
   *other half*: whose samples were neither learned from nor chosen by. If the uniform soup, or the best individual
   chosen without the samples it is scored on, is better beyond chance, that one is returned instead. What a soup is
   worth, the report data says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.events import Event
from stockpot.soup import weights
from stockpot.soups.fold import Fold, average, halves_of, thin_classes
from stockpot.soups.judging import FoldLearner, Put
from stockpot.soups.problem import Decision, Problem, StateStore, finite
from stockpot.soups.registry import Method
from stockpot.soups.settings import Settings
from stockpot.task import Data, Scores
from stockpot.task.data import generator
from stockpot.task.scores import worded

Split = tuple[Tensor, Tensor]  # places of the samples inside and outside a fold
Members = tuple[int, ...]  # the ingredients of a mean

# Samples from which running statistics are estimated for a mean that folds may set out from. All of them, every time,
# would take most of the time that a network with BatchNorm learns. No soup that is returned is chosen like that.
CALIBRATION = 1024
# Samples at most that the start is chosen on and that say when to stop. More of them cost time in proportion and
# changed no result that could be told from chance (docs/decisions.md).
ENOUGH = 2048


def crossfit_soup(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:
    """The default: cross-fitted and guarded."""
    if settings.folds == 1:  # asked for: then there is nothing to be judged and guarded by
        from stockpot.soups.learn import learned_soup

        return learned_soup(problem, method, settings, store)
    layout = problem.layout(settings.granularity)
    with problem.live(layout) as live:
        splits, few = divided(problem.task.fit, settings)
        simple: dict[str, Scores] = {}

        def begin(put: Put | None) -> Members:
            start = best_start(problem, live, splits, few, put)
            if put is not None:  # while all ingredients are at hand
                simple.update(_simple(problem, live, splits, few, put))
            return start

        found = _learned(problem, live, method, settings, splits, few, begin, store)
        return _guarded(problem, live, found, simple or _simple(problem, live, splits, few))


def divided(data: Data, settings: Settings) -> tuple[Sequence[Split], Tensor]:
    """The samples inside and outside every fold, and as many of all as decisions on the way are made on."""
    splits = data.folds(settings.folds, settings.seed)
    halves = [half for _, outside in splits for half in halves_of(data, outside)]
    return splits, enough(torch.arange(len(data)), settings.seed, halves)


def enough(indices: Tensor, seed: int, parts: Sequence[Tensor] = ()) -> Tensor:
    """As many of these samples as decisions on the way are made on, in their order, drawn by chance; some of each part.

    A part may be a single group, so small that none of it is drawn.
    """
    if len(indices) <= ENOUGH:
        return indices
    drawn = indices[torch.randperm(len(indices), generator=generator("enough", seed))[:ENOUGH]]
    missed = [part[:1] for part in parts if not torch.isin(part, drawn).any()]
    return torch.cat([drawn, *missed]).sort().values


def cross_fitted(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:
    """Any learned method once per fold, from the mean of all models, averaged."""
    layout = problem.layout(settings.granularity)
    with problem.live(layout) as live:
        splits, few = divided(problem.task.fit, settings)
        return _learned(problem, live, method, settings, splits, few, None, store)


def best_start(problem: Problem, live: Live, splits: Sequence[Split], few: Tensor, put: Put | None) -> Members:
    """The ingredients whose mean the folds set out from, decided on a few samples.

    How many that are is decided by samples that had no say in which they are; which, by all of them.
    """
    problem.sample(few, put)

    def ranked(rows: Tensor) -> list[int]:
        return problem.ranked([one.value for one in problem.individual_on(rows)], by_content=True)

    pairs = [(_both(inside, few), _both(outside, few)) for inside, outside in splits]
    rankings = [ranked(inside) for inside, _ in pairs]

    def scored(n: int) -> Scores:
        parts = []
        for ranking, (_, outside) in zip(rankings, pairs, strict=True):
            W = _put_mean(problem, live, ranking[:n], put)
            parts.append(problem.score_live(live, W, calibration=CALIBRATION, indices=outside, with_loss=False))
        return joined(parts, [torch.searchsorted(few, outside) for _, outside in pairs])

    n = fewer = len(problem.pool)
    best = scored(n)
    while fewer := fewer // 2:
        found = scored(fewer)
        if math.isnan(best.value) or found.difference(best)[1] > 0:
            n, best = fewer, found
    return tuple(ranked(few)[:n])


def _learned(
    problem: Problem,
    live: Live,
    method: Method,
    settings: Settings,
    splits: Sequence[Split],
    few: Tensor,
    begin: Callable[[Put | None], Members] | None,
    store: StateStore | None,
) -> Decision:
    """`begin` finds the start; without it, the folds set out from the mean of all models."""
    data = problem.task.fit
    halves = [halves_of(data, outside) for _, outside in splits]
    folds = [
        Fold(f, data.subset(inside), [data.subset(_both(half, few)) for half in halves[f]])
        for f, (inside, _) in enumerate(splits)
    ]
    parts: dict[tuple[int, int], Scores] = {}  # each fold's own soup on the samples it did not fit on

    def judge(fold: Fold, half: int, W: Tensor) -> None:
        parts[fold.number, half] = problem.score_live(live, W, indices=halves[fold.number][half], with_loss=False)

    learner = FoldLearner(problem, live, method, settings, folds, store, judge=judge, begin=begin)
    learner.run()
    W, beta = average(learner.averaged, method.simplex)
    return Decision(
        W,
        live.layout,
        beta,
        held_out=joined([parts[place] for place in sorted(parts)], [half for both in halves for half in both]),
        history=learner.history(),
        notes=(*learner.notes(), *thin_classes(data.labels, settings.folds)),
    )


def joined(parts: Sequence[Scores], places: Sequence[Tensor]) -> Scores:
    """Scores of parts of the samples as one, in the order of the whole."""
    table = torch.empty(sum(one.n for one in parts), parts[0].table.shape[1], dtype=torch.float64)
    for one, place in zip(parts, places, strict=True):
        table[place] = one.table
    units = parts[0].units
    if units is not None:
        units = torch.empty(len(table), dtype=torch.long)
        for one, place in zip(parts, places, strict=True):
            assert one.units is not None
            units[place] = one.units
    return replace(parts[0], table=table, units=units)


# The guard -----------------------------------------------------------------------------------------------


def _guarded(problem: Problem, live: Live, found: Decision, simple: Mapping[str, Scores]) -> Decision:
    """What was found, or what is simpler and better beyond chance."""
    assert found.held_out is not None
    problem.held_out.update(simple)
    known = {"learned": found.held_out, **simple}
    record = guard_record(known)
    problem.listen(Event("guard", record))
    history = (*found.history, {"kind": "guard", **record})
    winner = str(record["winner"])
    if winner == "learned":
        return replace(found, history=history)
    note = (
        f"the guard returned {winner}, on held-out data {worded(known[winner])}, instead of the learned soup,"
        f" {worded(known['learned'])}: more than chance explains"
    )
    K, G = len(problem.pool), len(live.layout)
    W = weights.uniform(K, G) if winner == "uniform" else weights.chosen(K, G, [problem.best_on(by_content=True)])
    notes = (note, *found.notes)
    return Decision(W, live.layout, None, None, known[winner], history, notes)


def _simple(
    problem: Problem, live: Live, splits: Sequence[Split], few: Tensor, put: Put | None = None
) -> dict[str, Scores]:
    """What is simpler, each sample scored by something that was chosen without it."""
    problem.sample(few, put)
    best = [
        problem.one_on(problem.best_on(_both(inside, few), by_content=True), outside, put) for inside, outside in splits
    ]
    uniform = problem.score_live(live, _put_mean(problem, live, range(len(problem.pool)), put), with_loss=False)
    return {"best": joined(best, [outside for _, outside in splits]), "uniform": uniform}


def _put_mean(problem: Problem, live: Live, members: Sequence[int], put: Put | None) -> Tensor:
    """Make the model the mean of these ingredients; returns its mixing weights."""
    K, G = len(problem.pool), len(live.layout)
    if put is not None:
        put(members)
    else:
        whole = problem.theta_bar(live) if len(members) == K else None
        live.theta.copy_(live.mean(list(members), listen=problem.listen) if whole is None else whole)
    return weights.chosen(K, G, members)


def _both(some: Tensor, others: Tensor) -> Tensor:
    """The samples that are in both."""
    return some[torch.isin(some, others)]


def guard_record(known: Mapping[str, Scores]) -> dict[str, Any]:
    """Who wins between `learned` and the others, all scored on the same samples, and by how much.

    Each of the others is another chance to be ahead by luck, so they share the 5 % (Bonferroni).
    """
    confidence = 1 - 0.05 / (len(known) - 1)
    over = {
        name: scores.difference(known["learned"], confidence) for name, scores in known.items() if name != "learned"
    }
    better = [name for name, (_, low, _) in over.items() if low > 0]  # beyond chance
    if math.isnan(known["learned"].value):
        better = [name for name in over if not math.isnan(known[name].value)]
    return {
        "held_out": {name: finite(one.value) for name, one in known.items()},
        "intervals": {name: [finite(end) for end in one.interval()] for name, one in known.items()},
        "over_learned": {name: [finite(x) for x in found] for name, found in over.items()},
        "winner": max(better, key=lambda name: known[name].value, default="learned"),
    }
