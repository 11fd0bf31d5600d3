"""Methods that do not learn: the best individual, the uniform soup, the ensemble, and the greedy soup.

Greedy adds ingredients in the order of their own score while the soup gets better. The running sum of the chosen models
stays in memory, so each candidate is read once. Where the metric is a mean with a known ceiling, a candidate is dropped
as soon as even perfect scores on all remaining samples could not make it win; the samples most likely to fail come
first, so that this happens early. The chosen set is that of the plain algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.engine.loader import reading_ahead
from stockpot.events import Event, progress
from stockpot.soup import weights
from stockpot.soups.problem import Decision, Problem, StateStore
from stockpot.soups.registry import Method
from stockpot.soups.settings import Settings
from stockpot.task import Scores


def best(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:  # noqa: ARG001
    """The ingredient with the highest score on the fitting data."""
    layout = problem.layout("model")
    winner = problem.best_on()
    note = f"the best ingredient on the fitting data is {problem.pool.names[winner]}"
    W = weights.chosen(len(problem.pool), len(layout), [winner])
    return Decision(W, layout, notes=(note,))


def uniform(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:  # noqa: ARG001
    """The mean of all ingredients."""
    layout = problem.layout("model")
    return Decision(weights.uniform(len(problem.pool), len(layout)), layout)


def ensemble(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:  # noqa: ARG001
    """The mean of all models' outputs."""
    scores = problem.task.ensemble_scores(problem.members(), listen=problem.listen)
    note = "averages the outputs of all models: a baseline that costs K times as much to serve, not a soup"
    return Decision(None, scores=scores, notes=(note,))


def greedy_soup(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:  # noqa: ARG001
    layout, K = problem.layout("model"), len(problem.pool)
    with problem.live(layout) as live:
        found = greedy(problem, live, ties=settings.ties, samples=settings.samples)
    tried = len(found.history)
    notes = () if tried == K else (f"its budget was over when {tried} of {K} models had been tried",)
    return Decision(found.W, layout, history=found.history, notes=notes)


@dataclass(frozen=True)
class Greedy:
    chosen: tuple[int, ...]  # in the order they were added
    W: Tensor  # (K, G)
    evaluated: int  # samples evaluated after the ingredients themselves
    history: tuple[dict[str, object], ...]


def greedy(
    problem: Problem, live: Live, *, ties: bool = False, early: bool = True, samples: float = math.inf
) -> Greedy:
    """Choose on the fitting data, with so many samples at most. `early=False` is the plain algorithm, for tests.

    Ingredients of equal score are tried in the pool's order. A candidate stays when the score rises (with `ties`: does
    not fall).
    """
    K, G = len(problem.pool), len(live.layout)
    own = problem.individual()
    ranking = problem.ranked([scores.value for scores in own])
    chosen = [ranking[0]]
    current = own[ranking[0]]  # scores of the soup so far
    history = [_decision(problem, ranking[0], True, current.value, current.n)]
    total = live.read(ranking[0], out=torch.empty_like(live.theta))  # (P,) sum of the chosen
    candidate = torch.empty_like(total)
    evaluated = 0
    ceiling = problem.task.metric.ceiling if early else None
    difficulty = torch.stack([one.table for one in own]).mean(dim=(0, 2)) if ceiling is not None else None  # (n,)
    with reading_ahead(live, ranking[1:]) as read:
        for position, k in enumerate(ranking[1:], start=2):
            if evaluated + current.n > samples or problem.late(problem.seconds_each or 0.0):
                break
            read(k, candidate).add_(total)
            torch.div(candidate, len(chosen) + 1, out=live.theta)
            W = weights.chosen(K, G, [*chosen, k])
            order, stop = torch.arange(current.n), None
            if ceiling is not None and difficulty is not None:
                # Likely failures first: what the soup gets wrong now, then what most ingredients get wrong.
                order = torch.argsort(current.table[:, 0] + difficulty / 2, stable=True)
                stop = _hopeless(ceiling, current.n, float(current.table.sum()), ties)
            scores = problem.score_live(live, W, indices=order, stop=stop, with_loss=False)
            evaluated += scores.n
            better = scores.complete and _wins(*_compared(scores, current), ties)
            history.append(_decision(problem, k, better, scores.value if scores.complete else None, scores.n))
            problem.listen(Event("greedy", history[-1]))
            progress(problem.listen, "greedy soup", position, K, "models")
            if better:
                chosen.append(k)
                total.copy_(candidate)
                table = torch.empty_like(current.table).index_copy_(0, order, scores.table)
                current = replace(current, table=table)
    return Greedy(tuple(chosen), weights.chosen(K, G, chosen), evaluated, tuple(history))


def _compared(scores: Scores, current: Scores) -> tuple[float, float]:
    """Two scores to compare. Sums of means, so that the order of the samples cannot change the outcome."""
    found = []
    for one in (scores, current):
        mean = one.metric.is_mean
        found.append(float(one.table.sum()) if mean else one.value)
    return found[0], found[1]


def _wins(score: float, best: float, ties: bool) -> bool:
    """A score that is no number never wins, and loses against any other."""
    if math.isnan(best):
        return not math.isnan(score)
    return score >= best if ties else score > best


def _hopeless(ceiling: float, n: int, best: float, ties: bool) -> Callable[[float, int], bool]:
    return lambda score, done: not math.isnan(best) and not _wins(score + ceiling * (n - done), best, ties)


def _decision(problem: Problem, k: int, added: bool, score: float | None, evaluated: int) -> dict[str, object]:
    return {
        "kind": "greedy",
        "ingredient": problem.pool.names[k],
        "index": k,
        "added": added,
        "score": score,  # None: given up before the end
        "evaluated": evaluated,
    }
