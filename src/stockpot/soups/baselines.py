"""What learned soups are compared with: the best individual, the uniform soup, the ensemble."""

from __future__ import annotations

from stockpot.soup import weights
from stockpot.soups.problem import Decision, Problem, StateStore
from stockpot.soups.registry import Method
from stockpot.soups.settings import Settings


def best(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:  # noqa: ARG001
    """The ingredient with the highest score on the fitting data."""
    layout = problem.layout("model")
    winner = problem.best_on()
    note = f"the best ingredient on the fitting data is {problem.pool.names[winner]}"
    W = weights.chosen(len(problem.pool), len(layout), [winner])
    return Decision(W, layout, models_used=1, notes=(note,))


def uniform(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:  # noqa: ARG001
    """The mean of all ingredients."""
    layout = problem.layout("model")
    K = len(problem.pool)
    return Decision(weights.uniform(K, len(layout)), layout, models_used=K)


def ensemble(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:  # noqa: ARG001
    """The mean of all models' outputs."""
    scores = problem.task.ensemble_scores(problem.members(), listen=problem.listen)
    note = "averages the outputs of all models: a baseline that costs K times as much to serve, not a soup"
    return Decision(None, scores=scores, models_used=len(problem.pool), notes=(note,))
