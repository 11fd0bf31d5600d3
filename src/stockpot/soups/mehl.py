"""MEHL-Soup(+) (Li et al., ECCV 2024): Algorithm 1 with equations 4 and 6, line by line.

    theta_bar  (P,)    mean of the K fine-tuned models, flat
    d_k        (P,)    theta_k - theta_bar; D holds those of a block, (b, P)
    alpha      (K, G)  coefficients, one per model and group of tensors
    theta      (P,)    the soup: theta_bar + sum_k alpha_k d_k, a pure function of alpha

With one block of all K models this is HL-Soup(+). With `simplex` it is Learned-Soup(+): alpha goes through a softmax
over the models, and since that sums to one, following the d_k is the same as mixing the theta_k.

`mehl_soup` is a generator. It yields after every burst of steps and holds nothing that is not in `State`: whoever
drives it may save, stop, go on in another process, change the coefficients or the pace, or try again with less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from math import cos, log, pi

import torch
from torch import Tensor

from stockpot.engine import Directions, Engine
from stockpot.engine.inner_loop import Batch, InnerLoop, Step, Variables
from stockpot.task.data import Data, generator

BURST = 50  # steps at most between two yields
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # of AdamW


@dataclass
class State:
    """Everything the next step depends on, on the host."""

    alpha: Tensor  # (K, G)
    beta: float | None = None  # the learned factor on the logits, where there is one
    t: int = 0  # blocks finished
    j: int = 0  # steps taken or skipped in block t
    variables: dict[str, Tensor] = field(default_factory=dict)  # of block t after j steps; empty at its start
    pace: float = 1.0  # factor on the learning rate; a driver may change it
    steps: Sequence[Step] = ()  # what the steps since the last yield found

    def mean_since(self, block: Sequence[int]) -> tuple[Tensor, float | None]:
        """The mean of the block's coefficients (b, G), and of beta, over the steps since this was last asked."""
        v = self.variables
        x = v["total"] / v["taken"] if v["taken"] > 0 else v["x"].clone()
        v["total"], v["taken"] = torch.zeros_like(v["total"]), torch.zeros_like(v["taken"])
        return unpacked(x, len(block), self.beta is not None)

    def go_to(self, block: Sequence[int], alpha: Tensor, beta: float | None) -> None:
        """Other coefficients (b, G) for the block, and an optimiser that remembers nothing."""
        self.alpha[list(block)], self.beta = alpha, beta
        self.variables = {}


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
    every: int = BURST,
    seed: Callable[[int], None] = lambda _: None,
    state: State,
) -> Iterator[State]:
    """Algorithm 1 from `state` on. `batches(i)` are the samples of step i; it yields at every multiple of `every`."""
    s = state  # line 1, theta_bar, is the engine's; line 2: alpha = 0 makes theta = theta_bar
    while s.t < len(blocks):  # line 3
        block = list(blocks[s.t])  # line 4: K_t
        D = engine.load(block)  # line 5
        theta_fix = engine.theta_fix(s.alpha, block)  # line 6: the soup without this block's share

        def step(v: Variables, rate: Tensor, batch: Batch) -> Tensor:
            alpha, beta = split(v.x, D.rows.shape[0], s.beta is not None)  # noqa: B023  (used in this turn only)
            c = alpha.softmax(dim=0) if simplex else alpha
            engine.mix(theta_fix, c)  # line 9  # noqa: B023
            loss, slope, slope_beta = engine.gradient(D, batch, beta)  # lines 10 and 11, eq. 6  # noqa: B023
            if simplex:  # the softmax's Jacobian
                slope = c * (slope - (c * slope).sum(dim=0, keepdim=True))
            return adamw(v, slope, slope_beta, loss, rate, weight_decay)  # lines 12 to 17

        loop = engine.inner_loop(step, packed(s.alpha[block], s.beta), data, (simplex, weight_decay))
        if s.variables:
            loop.variables.load(s.variables)
        while s.j < J:  # line 7
            stop = min(J, (s.j // every + 1) * every, s.j + loop.burst)
            rates = [s.pace * eta * (1 + cos(pi * j / J)) / 2 for j in range(s.j, stop)]
            i = s.t * J + s.j  # line 8
            seed(i)
            s.steps = loop.run([batches(i + n) for n in range(len(rates))], rates)
            s.j = stop
            _keep(s, block, loop)
            yield s
            _take(s, block, loop)
        s.t, s.j, s.variables = s.t + 1, 0, {}  # line 19: theta follows from alpha


def adamw(
    v: Variables, slope: Tensor, slope_beta: Tensor | None, loss: Tensor, rate: Tensor, weight_decay: float
) -> Tensor:
    """One AdamW step on the coefficients, and on beta without decay; returns (loss, skipped) on the device.

    Where the loss or the gradient is not finite, nothing changes. Squares are looked at, because AdamW squares too.
    """
    with torch.no_grad():
        g = slope.reshape(-1) if slope_beta is None else torch.cat([slope.reshape(-1), slope_beta.view(1)])
        sound = torch.isfinite(loss * 0 + g.square().sum())
        decay = torch.full_like(v.x, weight_decay)
        if slope_beta is not None:
            decay[-1:].zero_()
        m = v.m.lerp(g, 1 - BETA1)
        u = v.v * BETA2 + (1 - BETA2) * g * g
        n = v.count + 1
        first = -torch.expm1(n * log(BETA1))  # 1 - BETA1^n
        second = -torch.expm1(n * log(BETA2))
        x = v.x * (1 - rate * decay) - (rate / first) * m / (u.sqrt() / second.sqrt() + EPS)
        for old, new in ((v.x, x), (v.m, m), (v.v, u), (v.count, n)):
            old.copy_(torch.where(sound, new, old))
        v.total.add_(torch.where(sound, v.x, torch.zeros_like(v.x)))
        v.taken.add_(sound.to(v.taken.dtype))
        return torch.stack([loss, (~sound).to(loss.dtype)])


def weights(alpha: Tensor, simplex: bool = False) -> Tensor:
    """W (K, G), what a soup is made of: every column sums to one (eq. 4)."""
    alpha = alpha.double()
    return alpha.softmax(dim=0) if simplex else 1 / len(alpha) + alpha - alpha.mean(dim=0)


def schedule(
    models: int, size: int, *, passes: int = 1, blocks: int | None = None, seed: int = 0
) -> list[list[int]]:
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


def packed(alpha: Tensor, beta: float | None) -> Tensor:
    """Coefficients (b, G), and beta behind them, as one vector."""
    flat = alpha.reshape(-1)
    return flat if beta is None else torch.cat([flat, torch.tensor([beta], dtype=alpha.dtype)])


def split(x: Tensor, b: int, has_beta: bool) -> tuple[Tensor, Tensor | None]:
    """The vector's parts, as views: coefficients (b, G) and beta."""
    return (x[:-1].view(b, -1), x[-1]) if has_beta else (x.view(b, -1), None)


def unpacked(x: Tensor, b: int, has_beta: bool) -> tuple[Tensor, float | None]:
    alpha, beta = split(x, b, has_beta)
    return alpha.clone(), None if beta is None else float(beta)


def _keep(s: State, block: list[int], loop: InnerLoop) -> None:
    s.variables = loop.variables.save()
    s.alpha[block], s.beta = unpacked(s.variables["x"], len(block), s.beta is not None)


def _take(s: State, block: list[int], loop: InnerLoop) -> None:
    """What the driver made of the state, back to the device; an empty one begins anew from alpha."""
    if not s.variables:
        s.variables = Variables.fresh(packed(s.alpha[block], s.beta)).save()
    loop.variables.load(s.variables)


__all__ = ["Directions", "State", "mehl_soup", "schedule", "weights"]
