"""MEHL-Soup(+) (Li et al., ECCV 2024): Algorithm 1 with equations 4 and 6, line by line.

    theta_bar  (P,)    mean of the K fine-tuned models, flat
    d_k        (P,)    theta_k - theta_bar; D holds those of a block, (b, P)
    alpha      (K, G)  coefficients, one per model and group of tensors
    theta      (P,)    the soup: theta_bar + sum_k alpha_k d_k, a pure function of alpha

With one block of all K models this is HL-Soup(+). With `simplex` it is Learned-Soup(+): alpha goes through a softmax
over the models, and since that sums to one, following the d_k is the same as mixing the theta_k.

`mehl_soup` is a generator. It yields after every burst of steps and holds nothing that is not in `State`: whoever
drives it (soups/learn.py) may save, stop, go on in another process, change the coefficients or the pace, or try again
with less memory.
"""

# ruff: noqa: B023  (a step is taken within its own turn of the loop)
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import cos, pi
from typing import NamedTuple

import torch
from torch import Tensor

from stockpot.engine import AdamW, Batch, Engine
from stockpot.task import Data
from stockpot.task.data import generator


class Step(NamedTuple):
    """What one step found."""

    loss: float  # of its batch, before the step
    rate: float
    skipped: bool  # something was not finite, and nothing was changed


@dataclass
class State:
    """Everything the next step depends on."""

    alpha: Tensor  # (K, G), on the host
    beta: float | None = None  # the learned factor on the logits, where there is one
    t: int = 0  # blocks finished
    j: int = 0  # steps taken or skipped in block t
    pace: float = 1.0  # factor on the learning rate; a driver may change it
    optimiser: AdamW | None = None  # of block t, on the device; None before its first step
    saved: dict[str, Tensor] | None = None  # what to load into the next optimiser, where a run goes on
    steps: Sequence[Step] = ()  # taken since the last yield


def mehl_soup(
    engine: Engine,
    blocks: Sequence[Sequence[int]],
    data: Data,
    batches: Callable[[int], Tensor],
    *,
    J: int,
    eta: float,
    weight_decay: float = 0.1,
    simplex: bool = False,
    every: int = 50,
    until: int | None = None,
    seed: Callable[[int], None] = lambda _: None,
    state: State,
) -> Iterator[State]:
    """Algorithm 1 from `state` on. `batches(i)` are the samples of step i; it yields at every multiple of `every`.

    With `until` it leaves after that many steps of the block, taken at a rate that only the pace changes, and the
    block is not finished: another fold may use what is loaded, and this one goes on from `state` later.
    """
    s = state  # line 1, theta_bar, is the engine's; line 2: alpha = 0 makes theta = theta_bar
    while s.t < len(blocks):  # line 3
        block = list(blocks[s.t])  # line 4: K_t
        D = engine.load(block)  # line 5
        theta_fix = engine.theta_fix(s.alpha, block)  # line 6: the soup without this block's share
        optimiser = s.optimiser = engine.optimiser(s.alpha[block], s.beta, weight_decay)
        if s.saved is not None:
            optimiser.load(s.saved)
            s.saved = None

        def step(rate: Tensor, batch: Batch) -> Tensor:
            c = optimiser.alpha.softmax(dim=0) if simplex else optimiser.alpha  # (b, G)
            engine.mix(theta_fix, c)  # line 9
            loss, slope, slope_beta = engine.gradient(D, batch, optimiser.beta)  # line 11, eq. 6
            if simplex:  # the softmax's Jacobian
                slope = c * (slope - (c * slope).sum(dim=0, keepdim=True))
            return optimiser.step(loss, slope, slope_beta, rate)  # lines 12 to 16

        take = engine.prepared(step, optimiser, data, simplex)
        while s.j < (end := J if until is None else until):  # line 7
            stop = min(end, (s.j // every + 1) * every, s.j + engine.burst)
            rates = [s.pace * eta * (1 if until else (1 + cos(pi * j / J)) / 2) for j in range(s.j, stop)]
            found = []
            seed(s.t * J + s.j)
            # All rates go to the device at once: each copy alone would make the host wait for the step before.
            for i, rate in enumerate(optimiser.x.new_tensor(rates), start=s.t * J + s.j):  # line 8
                found.append(take(rate, engine.batch(data, batches(i))))  # line 10: batch i
            losses = torch.stack(found).tolist()  # the host waits for the device here
            s.steps = [Step(loss, rate, bool(skipped)) for (loss, skipped), rate in zip(losses, rates, strict=True)]
            s.j = stop
            s.alpha[block], s.beta = optimiser.values()
            yield s
        if until is not None:
            s.saved, s.optimiser = optimiser.save(), None
            return
        s.alpha[block], s.beta = optimiser.values()  # line 17: theta follows from alpha
        s.t, s.j, s.optimiser = s.t + 1, 0, None
        del D, optimiser, step, take  # the block is freed before the next one is loaded


def weights(alpha: Tensor, simplex: bool = False) -> Tensor:
    """W (K, G), what a soup is made of: every column sums to one (eq. 4)."""
    alpha = alpha.double()
    return alpha.softmax(dim=0) if simplex else 1 / len(alpha) + alpha - alpha.mean(dim=0)


def schedule(models: int, size: int, *, passes: int = 1, blocks: int | None = None, seed: int = 0) -> list[list[int]]:
    """K_1 to K_T: shuffled passes over the models, cut into blocks of at most `size`.

    Indices within a block are sorted, so that one block of all models is the same whatever the seed.
    """

    def endless() -> Iterator[list[int]]:
        for number in count():
            order = torch.randperm(models, generator=generator("blocks", seed, number)).tolist()
            for start in range(0, models, size):
                yield sorted(order[start : start + size])

    wanted = blocks if blocks is not None else passes * -(-models // size)
    return list(islice(endless(), wanted))
