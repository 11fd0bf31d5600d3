"""Cross-fitting: learn once per fold, stop on the fold left out, average the mixing weights, and guard the result.

Every fold sets out from its own greedy soup, chosen without the samples it leaves out. Since every sample is left out
by one fold, the folds' own soups have a score on all of them. It is a little too good, because the same samples said
when to stop, and lower than the average of all folds deserves. The guard holds it against what is simpler: the uniform
soup, the best individual and the greedy soup, each chosen without the samples it is scored on. If one of them is better
beyond chance, that one is returned instead. What a soup is worth, the report data says.
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
from stockpot.soups.fold import Fold, average
from stockpot.soups.greedy import greedy
from stockpot.soups.learn import Learner, Put
from stockpot.soups.problem import Decision, Problem, StateStore, finite
from stockpot.soups.registry import Method
from stockpot.soups.settings import Settings
from stockpot.task import Scores
from stockpot.task.data import generator
from stockpot.task.scores import worded

Split = tuple[Tensor, Tensor]  # places of the samples inside and outside a fold
Members = tuple[int, ...]  # the ingredients of a greedy soup

# Samples from which running statistics are estimated for a candidate of a fold's own start. All of them, for every
# candidate of every fold, would take most of the time that a network with BatchNorm learns. No soup that is returned is
# chosen like that.
CALIBRATION = 1024
# Samples at most that a start is chosen on, and that say when a fold stops. More of them cost time in proportion and
# changed no result that could be told from chance (docs/decisions.md).
ENOUGH = 2048
SHOWN = 5  # classes named in one note


def crossfit_soup(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:
    """The default: cross-fitted from greedy soups, and guarded."""
    if settings.folds == 1:  # asked for: then there is nothing to be judged and guarded by
        from stockpot.soups.learn import learned_soup

        return learned_soup(problem, method, settings, store)
    layout = problem.layout(settings.granularity)
    with problem.live(layout) as live:
        splits = problem.task.fit.folds(settings.folds, settings.seed)
        few = enough(torch.arange(len(problem.task.fit)), settings.seed)
        saved = None if store is None else store.load()
        starts = None if saved is None else [tuple(start) for start in saved[1]["starts"]]
        simple: dict[str, Scores] = {}

        def begin(put: Put | None) -> list[Members]:
            nonlocal starts
            starts = _starts(problem, live, settings, splits, few, put)
            if put is not None:  # while all ingredients are at hand
                simple.update(_simple(problem, live, splits, few, starts, put))
            return starts

        found = _learned(problem, live, method, settings, splits, starts, begin, store)
        assert starts is not None
        if not simple:
            simple |= _simple(problem, live, splits, few, starts)
        return _guarded(problem, live, settings, found, simple)


def enough(indices: Tensor, seed: int) -> Tensor:
    """As many of these samples as decisions on the way are made on, in their order, drawn by chance."""
    if len(indices) <= ENOUGH:
        return indices
    drawn = torch.randperm(len(indices), generator=generator("enough", seed))[:ENOUGH]
    return indices[drawn.sort().values]


def cross_fitted(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:
    """Any learned method once per fold, from the mean of all models, averaged."""
    layout = problem.layout(settings.granularity)
    with problem.live(layout) as live:
        splits = problem.task.fit.folds(settings.folds, settings.seed)
        return _learned(problem, live, method, settings, splits, None, None, store)


def _starts(
    problem: Problem, live: Live, settings: Settings, splits: Sequence[Split], few: Tensor, put: Put | None
) -> list[Members]:
    """Each fold's own greedy soup, on those of its samples that are among a few."""
    problem.sample(few, put)
    return [
        greedy(
            problem, live, indices=_both(inside, few), ties=settings.ties, by_content=True, calibration=CALIBRATION,
            put=put, label=f"greedy soup, fold {f + 1} of {len(splits)}",
        ).chosen
        for f, (inside, _) in enumerate(splits)
    ]  # fmt: skip


def _learned(
    problem: Problem,
    live: Live,
    method: Method,
    settings: Settings,
    splits: Sequence[Split],
    starts: Sequence[Members] | None,
    begin: Callable[[Put | None], Sequence[Members]] | None,
    store: StateStore | None,
) -> Decision:
    """`begin` finds starts where none are given; without both, every fold sets out from the mean of all models."""
    data = problem.task.fit
    folds = [
        Fold(f, data.subset(inside), data.subset(enough(outside, settings.seed)), None if starts is None else starts[f])
        for f, (inside, outside) in enumerate(splits)
    ]
    learner = Learner(problem, live, method, settings, folds, store)
    parts: dict[int, Scores] = {}  # each fold's own soup on the samples it did not fit on
    loss_together = math.nan  # of the average of all folds, on all fitting data

    def judge(some: Sequence[Fold]) -> None:
        nonlocal loss_together
        W, _ = average(some, method.simplex)
        several = len({fold.start for fold in folds}) > 1
        if len(some) == 1:
            f = some[0].number  # judged again where memory ran out meanwhile
            parts[f] = problem.score_live(live, W, indices=splits[f][1], with_loss=several)
        elif several:
            loss_together = problem.score_live(live, W).loss

    learner.run(judge, begin if starts is None else None)
    kept: Sequence[Fold] = folds
    history, notes = learner.history(), learner.notes()
    if len({fold.start for fold in folds}) > 1:
        kept, record, note = without_hill(folds, [parts[f].loss for f in range(len(folds))], loss_together)
        problem.listen(Event("average", record))
        history, notes = (*history, {"kind": "average", **record}), (*note, *notes)
    W, beta = average(kept, method.simplex)
    return Decision(
        W,
        live.layout,
        beta,
        held_out=together([parts[f] for f in range(len(folds))], [outside for _, outside in splits]),
        history=history,
        models_used=int((W != 0).any(dim=1).sum()),
        notes=(*notes, *_thin_classes(data.labels, settings.folds)),
    )


def without_hill(
    folds: Sequence[Fold], losses: Sequence[float], loss_together: float
) -> tuple[Sequence[Fold], dict[str, Any], tuple[str, ...]]:
    """The folds to average, what was compared, and a note where some are left out.

    The average of soups is better than they are where the loss has no hill between them. Folds that set out from one
    place have none; folds from different places may. The average is flattered on the fitting data, by the folds that
    learned from it, and the folds are not on what they left out (`losses`): where the average is worse even so, a hill
    lies between, and the folds with the lowest loss that set out from one place are kept alone.
    """
    by_start: dict[Any, list[Fold]] = {}
    for fold in folds:
        by_start.setdefault(fold.start, []).append(fold)

    def mean_loss(some: Sequence[Fold]) -> float:
        sizes = {fold.number: len(fold.held_out) for fold in some if fold.held_out is not None}
        return sum(losses[number] * size for number, size in sizes.items()) / sum(sizes.values())

    def names(some: Sequence[Fold]) -> str:
        return f"fold{'s' * (len(some) > 1)} {', '.join(str(fold.number + 1) for fold in some)}"

    apart = mean_loss(folds)
    record = {"together": finite(loss_together), "apart": {names(one): mean_loss(one) for one in by_start.values()}}
    if not math.isfinite(apart) or loss_together <= apart:
        return folds, {**record, "kept": "all"}, ()
    kept = min(by_start.values(), key=mean_loss)
    note = (
        f"only {names(kept)} {'are' if len(kept) > 1 else 'is'} in this soup: the average of all folds has a loss of"
        f" {loss_together:.4g} on the fitting data, the folds themselves {apart:.4g} on what they left out"
    )
    return kept, {**record, "kept": names(kept)}, (note,)


def together(parts: Sequence[Scores], places: Sequence[Tensor]) -> Scores:
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


def _guarded(
    problem: Problem, live: Live, settings: Settings, found: Decision, simple: Mapping[str, Scores]
) -> Decision:
    """What was found, or what is simpler and better beyond chance."""
    assert found.held_out is not None
    problem.held_out.update(simple)
    known = {"learned": found.held_out, **simple}
    record = judged(known)
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
    if winner == "uniform":
        W = weights.uniform(K, G)
    elif winner == "best":
        W = weights.chosen(K, G, [problem.best_on(by_content=True)])
    else:
        W = greedy(problem, live, ties=settings.ties, by_content=True).W
    used = int((W != 0).any(dim=1).sum())
    notes = (note, *found.notes)
    return Decision(W, live.layout, None, None, known[winner], history, models_used=used, notes=notes)


def _simple(
    problem: Problem,
    live: Live,
    splits: Sequence[Split],
    few: Tensor,
    starts: Sequence[Members],
    put: Put | None = None,
) -> dict[str, Scores]:
    """What is simpler, each sample scored by something that was chosen without it."""
    K, G = len(problem.pool), len(live.layout)
    places = [outside for _, outside in splits]

    def means(members: Sequence[int], theta: Tensor | None = None) -> Tensor:
        """Make the model this mean; returns its mixing weights."""
        if put is not None:
            put(members)
        else:
            live.theta.copy_(live.mean(list(members), listen=problem.listen) if theta is None else theta)
        return weights.chosen(K, G, members)

    problem.sample(few, put)
    best = [
        problem.one_on(problem.best_on(_both(inside, few), by_content=True), outside, put) for inside, outside in splits
    ]
    uniform = problem.score_live(live, means(range(K), problem.theta_bar(live)), with_loss=False)
    greedy_parts = [
        problem.score_live(live, means(members), indices=outside, with_loss=False)
        for members, outside in zip(starts, places, strict=True)
    ]
    return {"best": together(best, places), "uniform": uniform, "greedy": together(greedy_parts, places)}


def _both(some: Tensor, others: Tensor) -> Tensor:
    """The samples that are in both."""
    return some[torch.isin(some, others)]


def judged(known: Mapping[str, Scores]) -> dict[str, Any]:
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


def _thin_classes(labels: Tensor | None, folds: int) -> tuple[str, ...]:
    """Classes that some fold is judged without, however they are spread."""
    if labels is None:
        return ()
    classes, counts = torch.unique(labels[labels >= 0], return_counts=True)
    thin = [str(label) for label in classes[counts < folds].tolist()]
    if not thin:
        return ()
    more = f" and {len(thin) - SHOWN} more" if len(thin) > SHOWN else ""
    which = f"class {thin[0]} has" if len(thin) == 1 else f"classes {', '.join(thin[:SHOWN])}{more} have"
    return (f"{which} fewer than {folds} samples: some of the {folds} folds are judged without",)
