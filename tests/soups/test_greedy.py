"""Greedy soup: exactly the plain algorithm's choice, with fewer samples evaluated."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stockpot import Event, Task, cook
from stockpot.layout import Layout
from stockpot.pool import Pool
from stockpot.soup import Soup, weights
from stockpot.soups.baselines import Greedy, greedy
from stockpot.soups.problem import Problem
from zoo import fine_tunes, mlp, normed, samples, uneven, write


def choose(pool: Pool, task: Task, **options: Any) -> Greedy:
    problem = Problem(pool, task)
    with problem.live(problem.layout("model")) as live:
        return greedy(problem, live, **options)


def plain_greedy(pool: Pool, task: Task, ties: bool) -> list[int]:
    """The published algorithm, spelled out with soups built one by one."""
    layout = Layout.of(pool, "model")

    def score(rows: list[int]) -> float:
        Soup(pool, layout, weights.chosen(len(pool), 1, rows)).load_into(task.model)
        return float(task.score().table.sum())

    own = [score([k]) for k in range(len(pool))]
    ranking = sorted(range(len(pool)), key=lambda k: -own[k])  # stable: equal scores in the pool's order
    chosen, best = [ranking[0]], own[ranking[0]]
    for k in ranking[1:]:
        found = score([*chosen, k])
        if found > best or (ties and found == best):
            chosen, best = [*chosen, k], found
    return chosen


@given(seed=st.integers(0, 2**20), models=st.integers(2, 6), ties=st.booleans(), batch=st.integers(1, 9))
@settings(max_examples=25)
def test_the_chosen_set_is_the_plain_algorithms(seed: int, models: int, ties: bool, batch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool = write(Path(folder), fine_tunes(mlp, models, seed=seed, steps=4, spread=0.4))
        task = Task(mlp(), samples(31, seed=seed), batch_size=batch)
        fast = choose(pool, task, ties=ties)
        plain = choose(pool, task, ties=ties, early=False)
        wanted = plain_greedy(pool, task, ties)
    assert list(plain.chosen) == wanted
    assert fast.chosen == plain.chosen
    assert fast.evaluated <= plain.evaluated == (models - 1) * 31
    assert torch.equal(fast.W, weights.chosen(models, 1, wanted))


def test_hopeless_candidates_are_given_up_early(tmp_path: Path) -> None:
    good = fine_tunes(mlp, 1, steps=200, spread=0.0)[0]
    bad = [
        {n: v + 2 * torch.randn(v.shape, generator=torch.Generator().manual_seed(k)) for n, v in good.items()}
        for k in range(4)
    ]
    pool, task = write(tmp_path, [*bad, good]), Task(mlp(), samples(60), batch_size=2)
    fast, plain = choose(pool, task), choose(pool, task, early=False)
    assert fast.chosen == plain.chosen == (4,)
    assert fast.evaluated < plain.evaluated / 2


def test_order_and_ties_are_as_stated(tmp_path: Path) -> None:
    """Two equal models: their soup scores the same, so only `ties` lets the second in; the first in the pool leads."""
    state, other = fine_tunes(mlp, 2, steps=60)
    worse = {n: -v for n, v in other.items()}
    pool, task = write(tmp_path, [worse, state, state]), Task(mlp(), samples())
    assert choose(pool, task).chosen[0] == 1
    assert 2 not in choose(pool, task).chosen
    assert choose(pool, task, ties=True).chosen[:2] == (1, 2)
    result = cook(pool, task, "greedy", ties=True)
    assert result.soup is not None
    assert result.soup.W[1, 0] == result.soup.W[2, 0] > 0


def test_the_history_has_every_decision(tmp_path: Path) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 5, spread=0.4)), Task(mlp(), samples(), batch_size=4)
    events: list[Event] = []
    result = cook(pool, task, "greedy", listen=events.append)
    own = [one.value for one in Problem(pool, task).individual()]
    assert [h["index"] for h in result.history] == sorted(range(5), key=lambda k: (-own[k], k))
    assert [h["ingredient"] for h in result.history] == [pool.names[int(h["index"])] for h in result.history]
    added = [h for h in result.history if h["added"]]
    assert result.models_used == len(added)
    assert result.fit is not None
    assert added[-1]["score"] == pytest.approx(result.fit.value)
    assert all((h["score"] is None) == (h["evaluated"] < len(task.fit)) for h in result.history)
    assert [e.data["index"] for e in events if e.kind == "greedy"] == [h["index"] for h in result.history[1:]]


def test_a_metric_that_is_no_mean_is_never_given_up_early(tmp_path: Path) -> None:
    """No part of the samples says what F1 of all of them will be; the choice is the plain algorithm's."""
    pool = write(tmp_path, fine_tunes(mlp, 6, spread=0.5))
    task = Task(mlp(), samples(), metric="macro_f1", batch_size=7)
    fast, plain = choose(pool, task), choose(pool, task, early=False)
    assert fast.chosen == plain.chosen
    assert [h["score"] for h in fast.history] == [h["score"] for h in plain.history]
    assert {h["evaluated"] for h in fast.history} == {len(task.fit)}
    soup = Soup(pool, Layout.of(pool, "model"), fast.W)
    soup.load_into(task.model)
    assert [h["score"] for h in fast.history if h["added"]][-1] == pytest.approx(task.score().value)


def test_candidates_are_judged_with_statistics_of_their_own(tmp_path: Path) -> None:
    pool, task = write(tmp_path, fine_tunes(normed, 4)), Task(normed(), samples(), metric="loss")
    found = choose(pool, task)
    soup = Soup(pool, Layout.of(pool, "model"), found.W)
    soup.load_into(task.model)
    task.recalibrate()
    last = [h for h in found.history if h["added"]][-1]
    assert len(found.chosen) > 1
    assert last["score"] == pytest.approx(task.score().value, rel=1e-5)


def test_a_budget_that_is_over_ends_the_search_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = uneven(tmp_path)
    asked: list[float] = []

    def late(self: Problem, seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) > 2

    monkeypatch.setattr(Problem, "late", late)
    result = cook(pool, task, "greedy")
    assert len(result.history) == 3  # the best one, and two that were tried
    assert result.notes[0] == "its budget was over when 3 of 6 models had been tried"


def test_a_budget_in_samples_is_what_candidates_are_scored_on(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    n = len(task.fit)
    assert choose(pool, task, early=False).evaluated == 5 * n
    assert choose(pool, task, early=False, samples=3 * n - 1).evaluated == 2 * n
    result = cook(pool, task, "greedy", budget=f"{n - 1} samples")
    assert result.notes[0] == "its budget was over when 1 of 6 models had been tried"
