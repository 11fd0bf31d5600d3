"""A pass over samples gives what the plain loop gives; on a GPU also through graphs and with the data on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot import Task, cook
from stockpot.soups.baselines import greedy
from stockpot.soups.problem import Problem
from stockpot.task.data import forked_random
from stockpot.task.evaluator import FEWEST
from zoo import fine_tunes, mlp, normed, samples, write

N, SIZE = 8 * FEWEST + 3, 8
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


class Noisy(nn.Module):
    """Draws numbers in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + torch.randn_like(out)


class Counting(Noisy):
    """What it does depends on how often it was called, which a graph does not see."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x) * (-1) ** self.calls
        return out


class Asking(Noisy):
    """Asks the host, so it cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out if float(x.sum()) > 0 else -out


def task_of(build: Callable[[], nn.Module], device: str, **options: Any) -> Task:
    torch.manual_seed(0)
    return Task(build().to(device), samples(N), batch_size=SIZE, **options)


def plain(task: Task, rows: Tensor) -> Tensor:
    """The loop that every pass means."""
    tables = []
    with task.evaluating(), forked_random(task.device) as reseed:
        for part in rows.split(SIZE):  # type: ignore[no-untyped-call]
            batch = task.to_device(task.fit.batch(part))
            reseed(int(part[0]))
            tables.append(task._judge.statistics(batch, len(part), False)[0].cpu().double())
    return torch.cat(tables)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("build", [mlp, normed, Noisy, Asking])
def test_a_pass_is_the_plain_loop(build: Callable[[], nn.Module], metric: str, fast: bool, device: str) -> None:
    task = task_of(build, device, metric=metric)
    rows = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    for some in (rows, rows[: 2 * SIZE + 1], torch.arange(N)):
        with task.evaluator.fast(fast):
            found = [task.score(indices=some, with_loss=False).table for _ in range(2)]
        assert torch.equal(found[0], found[1])
        torch.testing.assert_close(found[0], plain(task, some), rtol=0, atol=0 if device == "cpu" else 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_that_is_stopped_has_the_first_samples(device: str) -> None:
    task = task_of(mlp, device)
    rows, asked = torch.arange(N), []

    def stop(total: float, done: int) -> bool:
        asked.append((total, done))
        return done >= 3 * SIZE

    with task.evaluator.fast():
        scores = task.score(indices=rows, stop=stop)
    table = plain(task, rows)
    assert not scores.complete
    assert scores.n == (3 if device == "cpu" else 4) * SIZE  # a GPU is asked one batch late
    assert torch.equal(scores.table, table[: scores.n])
    assert asked == [(float(table[:done].sum()), done) for done in range(SIZE, 3 * SIZE + 1, SIZE)]


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_user_wrote_runs_for_every_batch(device: str) -> None:
    seen: list[int] = []

    def metric(outputs: Tensor, batch: Any) -> Tensor:
        seen.append(len(outputs))
        return torch.eq(outputs.argmax(1), batch[1]).float()

    task = task_of(mlp, device, metric=metric)
    seen.clear()
    with task.evaluator.fast():
        task.score()
    assert seen == [SIZE] * (N // SIZE) + [N % SIZE]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_graphs_and_data_are_kept_only_while_they_are_wanted(device: str, tmp_path: Path) -> None:
    task = task_of(mlp, device)
    with task.evaluator.fast():
        first = task.score()
        assert [graph is not None for graph in task.evaluator._graphs.values()] == [True]
        assert torch.equal(first.table, task.score().table)
        assert len(task.evaluator._graphs) == 1
        with torch.no_grad():
            task.model[0].weight.neg_()  # type: ignore[index]
        assert torch.equal(task.score().table, plain(task, torch.arange(N)))  # the graph reads the weights
    pool = write(tmp_path, fine_tunes(mlp, 3))
    cook(pool, task, "crossfit", steps=20, batch_size=8)
    assert not task.evaluator._graphs
    assert not task.evaluator._columns
    assert not task.evaluator._sources


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_graph_that_does_something_else_is_not_used(device: str) -> None:
    task = task_of(Counting, device)
    with task.evaluator.fast():
        task.score()
        assert list(task.evaluator._graphs.values()) == [None]


@pytest.mark.parametrize("device", DEVICES)
def test_the_greedy_soup_is_that_of_all_samples_of_all_candidates(device: str, tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 6, spread=0.4))
    task = task_of(mlp, device)
    problem = Problem(pool, task)
    with problem.live(problem.layout("model")) as live:
        exact = greedy(problem, live, early=False)
        with task.evaluator.fast():
            found = greedy(problem, live)
    assert found.chosen == exact.chosen
    assert found.evaluated <= exact.evaluated
