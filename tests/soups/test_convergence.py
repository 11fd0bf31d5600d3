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
from stockpot.engine import AdamW
from stockpot.engine import engine as engines
from zoo import learning, weights_of


class GradientDescent(AdamW):
    """A second optimiser: the plain descent of the paper's lines 12 to 16."""

    def update(self, g: Tensor, rate: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.x - rate * g, self.m, self.v


def test_hl_reaches_the_best_point_of_the_hyperplane(tmp_path: Path) -> None:
    problem = Quadratic(tmp_path, models=5)
    settings: dict[str, Any] = {"steps": 600, "batch_size": 64, "weight_decay": 0.0, "lr": 0.1}
    assert_optimal(problem, weights_of(cook(problem.pool, problem.task, "hl", **settings)))


@pytest.mark.parametrize("block", [1, 2])
def test_so_does_mehl_by_gradient_descent(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "AdamW", GradientDescent)
    problem = Quadratic(tmp_path, models=5)
    settings: dict[str, Any] = {"steps": 6, "passes": 30, "batch_size": 64, "lr": 1.5 / problem.smoothness}
    assert_optimal(problem, weights_of(cook(problem.pool, problem.task, "mehl", block_size=block, **settings)))


def assert_optimal(problem: Quadratic, W: Tensor) -> None:
    assert (W[:, 0] - problem.optimum()).abs().max() <= 1e-4
    assert (problem.optimum() - 0.2).abs().max() > 0.05  # and it is not where learning starts
    assert problem.optimum().min() < 0  # nor on the simplex


def coefficients_over_time(problem: Quadratic, **settings: Any) -> list[Tensor]:
    """alpha after every outer iteration. [(K,)]"""
    path: list[Tensor] = []

    class Store:
        interval = math.inf
        peaks: Any = None

        def load(self) -> None:
            return None

        def save(self, tensors: dict[str, Tensor], values: dict[str, Any], part: int | None = None) -> None:
            path.append(tensors["0.alpha"][:, 0].clone())

    with learning(problem.pool, problem.task, "mehl", store=Store(), **settings) as learner:
        learner.run()
    return path


@pytest.mark.parametrize("batch", [64, 8])
def test_the_smallest_gradient_falls_with_the_outer_iterations_as_the_theorem_says(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theorem 3: min_t |grad|^2 <= 2K (L_1 - L_TJ) / (b sqrt T) + beta J sigma^2 K / (b sqrt T), in expectation.

    With full batches sigma is 0; otherwise the expectation is a mean over seeds. J = 1: the rate is constant.
    """
    monkeypatch.setattr(engines, "AdamW", GradientDescent)
    K, b, steps = 6, 2, 1
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
