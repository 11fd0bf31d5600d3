"""preset="authors" against a plain loop of its own, written from what the released code does."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot import Task, cook
from stockpot.errors import MethodError
from stockpot.pool import Pool
from stockpot.soups.authors import factor
from stockpot.soups.registry import settings_for
from zoo import fine_tunes, learning, mlp, samples, weights_of, write

FEATURES, CLASSES = 6, 3
SETTINGS: dict[str, Any] = {"steps": 20, "batch_size": 16, "lr": 0.1}


class SelfAttention(nn.Module):
    """A vision transformer, as far as clipping is concerned; its loss is steep, so that clipping matters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 8)
        self.outer = nn.Linear(8, CLASSES)
        self.frozen = nn.Parameter(torch.full((CLASSES,), 3.0))  # the same in all models, but it has a gradient

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 8 * (self.outer(torch.tanh(self.inner(x))) + self.frozen)
        return out


def pool_and_task(folder: Path, build: Any) -> tuple[Pool, Task]:
    states = [{n: v.double() for n, v in s.items()} for s in fine_tunes(build, 5, steps=3)]
    for state in states:
        if "frozen" in state:
            state["frozen"] = states[0]["frozen"]
    return write(folder, states), Task(build().double(), samples(dtype=torch.float64))


def their_loop(pool: Pool, task: Task, blocks: list[list[int]], *, clip: bool, per_tensor: bool) -> Tensor:
    """All parameters of the learned soup in one vector: one matrix of unit directions a block, torch's AdamW on top."""
    model = task.model
    parameters = list(model.named_parameters())
    sizes = [p.numel() for _, p in parameters] if per_tensor else [sum(p.numel() for _, p in parameters)]
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    spans = list(pairwise(starts))

    def flat(k: int) -> Tensor:
        return torch.cat([pool.tensor(k, name).reshape(-1) for name, _ in parameters])

    def put(theta: Tensor) -> None:
        at = 0
        for _, p in parameters:
            p.data.copy_(theta[at : at + p.numel()].view(p.shape))
            at += p.numel()

    theta: Tensor | None = None
    J = SETTINGS["steps"]
    model.train()
    for t, block in enumerate(blocks):
        P = torch.stack([flat(k) for k in block])  # (b, D)
        centre = P.mean(dim=0) if theta is None else theta
        P = P - centre
        for a, b in spans:
            norms = P[:, a:b].norm(dim=1, keepdim=True)
            P[:, a:b] = torch.where(norms > 0, P[:, a:b] / norms, P[:, a:b])
        X = torch.zeros(len(block), len(spans), dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.AdamW([X], weight_decay=0.0)
        theta = centre
        for s in range(J):
            put(theta)
            warm = int(J * 0.2)
            if s < warm:
                rate = SETTINGS["lr"] * (s + 1) / warm
            else:
                rate = 0.5 * SETTINGS["lr"] * (1 + math.cos(math.pi * (s - warm) / (J - warm)))
            x, y = task.fit.batch(task.fit.order(0, t * J + s, SETTINGS["batch_size"]))
            model.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            grads = torch.cat(
                [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for _, p in parameters]
            )
            if clip and grads.norm() > 1:
                grads = grads / (grads.norm() + 1e-6)
            X.grad = torch.stack([P[:, a:b] @ grads[a:b] for a, b in spans], dim=1)
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            theta = centre + torch.cat([X.detach()[:, j] @ P[:, a:b] for j, (a, b) in enumerate(spans)])
    assert theta is not None
    return theta


@pytest.mark.parametrize("build", [mlp, SelfAttention])
@pytest.mark.parametrize(
    ("method", "given"),
    [("hl", {}), ("hl+", {}), ("mehl", {"block_size": 2}), ("mehl+", {"block_size": 2, "passes": 2})],
)
def test_the_soup_is_that_of_a_plain_loop(tmp_path: Path, method: str, given: dict[str, Any], build: Any) -> None:
    pool, task = pool_and_task(tmp_path, build)
    with learning(pool, task, method, **given) as learner:
        blocks = learner.blocks
    result = cook(pool, task, method, preset="authors", **given, **SETTINGS)
    assert result.soup is not None
    state = result.soup.state_dict()
    found = torch.cat([state[name].reshape(-1) for name, _ in task.model.named_parameters()])
    clip = build is SelfAttention
    wanted = their_loop(pool, task, blocks, clip=clip, per_tensor=method.endswith("+"))
    assert (found - wanted).abs().max() <= 1e-10
    if clip:  # and it makes a difference
        other = their_loop(pool, task, blocks, clip=False, per_tensor=method.endswith("+"))
        assert (found - other).abs().max() > 1e-4


def test_the_rate_rises_by_equal_steps_to_its_height_and_falls_by_a_cosine() -> None:
    assert [factor(s, 10) for s in range(3)] == [0.5, 1.0, 1.0]
    assert factor(6, 10) == pytest.approx(0.5)
    assert [factor(s, 4) for s in range(2)] == [1.0, pytest.approx((1 + math.cos(math.pi / 4)) / 2)]  # no warm-up


def test_it_is_not_the_paper(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path, mlp)
    paper = weights_of(cook(pool, task, "mehl+", block_size=2, **SETTINGS))
    authors = weights_of(cook(pool, task, "mehl+", preset="authors", block_size=2, **SETTINGS))
    assert (paper - authors).abs().max() > 1e-2
    assert (authors.sum(dim=0) - 1).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("method", "given", "text"),
    [
        ("learned", {}, "preset 'authors' with method 'learned': expected one of hl, hl+, mehl, mehl+"),
        ("crossfit", {}, "preset 'authors' with method 'crossfit'"),
        ("mehl", {"block_size": 1}, "setting block_size with preset 'authors': expected at least 2"),
        ("mehl", {"folds": 3}, "setting folds with preset 'authors': expected a setting that the released code has"),
        ("hl", {"low_memory": True}, "setting low_memory with preset 'authors'"),
    ],
)
def test_what_their_code_does_not_have_is_refused(method: str, given: dict[str, Any], text: str) -> None:
    with pytest.raises(MethodError) as caught:
        settings_for(method, "authors", **given)
    assert text in str(caught.value)


def test_a_batch_in_pieces_gives_the_same_weights(tmp_path: Path) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples())
    options: dict[str, Any] = {"preset": "authors", "block_size": 2, "steps": 12, "batch_size": 16}
    whole = weights_of(cook(pool, task, "mehl+", **options))
    pieces = weights_of(cook(pool, task, "mehl+", accumulate=3, **options))
    assert (whole - pieces).abs().max() < 1e-4
