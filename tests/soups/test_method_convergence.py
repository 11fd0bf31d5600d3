"""Learning arrives where it should: closed-form optimum, and the rate of the paper's theorem."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quadratic import Quadratic
from torch import Tensor

from stockpot import cook
from zoo import learning


class Memory:
    """Keeps the newest state, which has the coefficients of every finished visit."""

    interval = float("inf")
    tensors: dict[str, Tensor]

    def load(self) -> None:
        return None

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.tensors = dict(tensors)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_mehl_reaches_the_best_point_of_the_hyperplane(tmp_path: Path, block: int) -> None:
    problem = Quadratic(tmp_path, models=5)
    result = cook(
        problem.pool,
        problem.task,
        "mehl",
        block_size=block,
        passes=1 if block == 5 else 30,
        steps=300 if block == 5 else 8,
        batch_size=64,
        optimizer="sgd",
        schedule="constant",
        weight_decay=0.0,
        lr=1 / problem.smoothness,
    )
    assert result.soup is not None
    found = result.soup.W[:, 0]
    assert (found - problem.optimum()).abs().max() <= 1e-4
    assert (problem.optimum() - 0.2).abs().max() > 0.05  # and it is not where learning starts
    assert problem.optimum().min() < 0  # nor on the simplex


def coefficients_over_time(problem: Quadratic, **settings: Any) -> list[Tensor]:
    """a after every outer iteration. [(K,)]"""
    store = Memory()
    sgd: dict[str, Any] = {"optimizer": "sgd", "schedule": "constant", "weight_decay": 0.0}
    with learning(problem.pool, problem.task, "mehl", store=store, **sgd, **settings) as learner:
        learner.run()
    a = torch.zeros(len(problem.pool), dtype=torch.float64)
    path = []
    for t, block in enumerate(learner.blocks):
        a = a.clone()
        a[block] = store.tensors[f"visit.{t}.0"][:, 0]
        path.append(a)
    return path


@pytest.mark.parametrize(("batch", "steps"), [(64, 1), (8, 3)])
def test_the_smallest_gradient_falls_with_the_outer_iterations_as_the_theorem_says(
    tmp_path: Path, batch: int, steps: int
) -> None:
    """Theorem 3: min_t |grad|^2 <= 2K (L_1 - L_TJ) / (b sqrt T) + beta J sigma^2 K / (b sqrt T), in expectation.

    With full batches sigma is 0; otherwise the expectation is a mean over seeds.
    """
    K, b = 6, 2
    problem = Quadratic(tmp_path, models=K)
    beta = problem.smoothness
    seeds = [0] if batch == 64 else [0, 1, 2]
    found: dict[int, float] = {}
    for T in (4, 16, 64):
        lr = min(1 / beta, 1 / math.sqrt(T))
        smallest, falls, sigmas = [], [], [0.0]
        for seed in seeds:
            path = coefficients_over_time(
                problem, block_size=b, blocks=T, steps=steps, batch_size=batch, lr=lr, seed=seed
            )
            smallest.append(torch.stack([problem.gradient(a).square().sum() for a in path]))
            falls.append(problem.loss(torch.zeros(K, dtype=torch.float64)) - problem.loss(path[-1]))
            if batch < 64:
                sigmas += [problem.variance(a) / batch for a in [torch.zeros_like(path[0]), *path]]
        found[T] = float(torch.stack(smallest).mean(dim=0).min())
        bound = 2 * K * (sum(falls) / len(falls)) / (b * math.sqrt(T)) + beta * steps * max(sigmas) * K / (
            b * math.sqrt(T)
        )
        assert found[T] <= bound
    assert found[16] < 0.5 * found[4]  # at least as fast as 1 / sqrt T
    assert found[64] < 0.5 * found[16]
