"""Ways to find coefficients on one fold: they differ in steps, coordinates, start, penalty and what is kept."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from learners.coordinates import Plain
from learners.problem import BATCH, Problem, lowest

EVALUATIONS = 20


@dataclass(frozen=True)
class Way:
    """One learner.

    Ours: `Way(300, 0.02, greedy=True, retreat=True, advance=1.5, evaluations=30, smooth=True, slowest=0.5**4)`.
    """

    steps: int = 300
    lr: float = 0.02
    weight_decay: float = 0.1
    coordinates: Plain = field(default_factory=Plain)
    penalty: float = 0.0  # times |theta - mean|^2 over the mean of |d_k|^2
    average: bool = False  # keep the mean of the second half's iterates
    greedy: bool = False  # start from the greedy soup of the fold
    whole: bool = False  # or rather of all fitting data
    smoothing: float = 0.0  # of the labels, while learning and where it is judged outside
    teacher: str = ""  # `ensemble` or `greedy`: whose probabilities stand for `share` of the label
    share: float = 0.0
    augmentation: float = 0.0  # strength of random changes to images while learning
    temperature: bool = False  # learn a factor on the logits as well
    calibrated: bool = False  # fit that factor before the first step
    block: int | None = None  # models moved at a time
    chosen_blocks: bool = False  # the next block by the size of its gradient
    first: Way | None = None  # start where this one ends, on the same fold
    retreat: bool = False  # where the held-out loss did not fall: back to the best, at half the rate
    advance: float = 1.0  # times this rate where the held-out loss fell
    remember: str = (
        ""  # on the way back AdamW's moments are forgotten, those of the `best`, or the `last` ones
    )
    slowest: float = 0.0  # give up at this share of the rate
    pace: float = 1.0  # share of the rate to begin with, before any judgement
    warmup: float = 0.0  # share of the steps over which the rate rises to the full one
    evaluations: int = EVALUATIONS
    constant: bool = False  # no schedule: the rate changes with the held-out loss alone
    smooth: bool = False  # judge, and keep, the mean of the iterates since the last judgement
    shared: bool = False  # AdamW with one second moment for all coefficients
    sharpness: bool = False  # judge by the loss with the best factor on the logits: being surer is no gain
    halfway: bool = (
        False  # judge the point half the way as well, and go there at half the rate where it is better
    )
    batch: int = BATCH
    lbfgs: bool = False  # full batches; `steps` is then the number of iterations


@dataclass(frozen=True)
class Solved:
    a: Tensor  # (K, G)
    held_out: float
    step: int  # where it was best
    start: Tensor  # (K, G)


def solve(problem: Problem, way: Way, inside: Tensor, outside: Tensor, seed: int) -> Solved:
    """Learn on `inside`, keep what was best on `outside`."""
    problem.smoothing, problem.strength = way.smoothing, way.augmentation
    problem.teacher, problem.share = way.teacher, way.share
    rows = torch.arange(len(problem.task.fit), device=inside.device) if way.whole else inside
    start = problem.greedy_start(rows) if way.greedy else torch.zeros_like(problem.a)
    if way.first is not None:
        start = solve(problem, way.first, inside, outside, seed).a
    if way.lbfgs:
        return _lbfgs(problem, way, start, inside, outside)
    return _adam(problem, way, start, inside, outside, seed)


def refit(problem: Problem, way: Way, rows: Tensor, step: int, seed: int) -> Tensor:
    """All data, for as many steps as were best on held-out folds."""
    return _adam(problem, way, torch.zeros_like(problem.a), rows, None, seed, stop=step).a


def _adam(
    problem: Problem,
    way: Way,
    start: Tensor,
    inside: Tensor,
    outside: Tensor | None,
    seed: int,
    stop: int | None = None,
) -> Solved:
    c = way.coordinates
    z = c.start(start).requires_grad_(True)
    tau = torch.ones((), device=z.device, requires_grad=True) if way.temperature else None
    if tau is not None and way.calibrated:
        tau.data.fill_(_factor(problem, start, inside))
    groups: list[dict[str, Any]] = [{"params": [z], "weight_decay": way.weight_decay}]
    if tau is not None:
        groups.append({"params": [tau], "weight_decay": 0.0})
    optimiser: torch.optim.Optimizer = (Shared if way.shared else torch.optim.AdamW)(groups, lr=way.lr)
    scale = float(problem.gram.diagonal(dim1=1, dim2=2).sum(0).mean())  # mean over k of |d_k|^2

    def judged(at: Tensor) -> float:
        assert outside is not None
        return problem.sharpened_loss_on(at, outside) if way.sharpness else problem.loss_on(at, outside, tau)

    best = Solved(start, math.inf if outside is None else judged(start), 0, start)
    total, count = torch.zeros_like(start), 0
    every = max(1, way.steps // way.evaluations)
    blocks: list[Tensor] = []
    per_block = way.steps if way.block is None else max(1, way.steps * way.block // problem.K)
    mask: Tensor | None = None
    generator = torch.Generator().manual_seed(seed)
    factor, best_z = way.pace, z.detach().clone()
    moments: dict[Any, Any] = {}
    best_tau = 1.0 if tau is None else float(tau.detach())
    for j in range(way.steps if stop is None else stop):
        if way.block is not None and j % per_block == 0:
            mask = _next_block(problem, way, c.to_a(z.detach()), inside, blocks, generator)
        rows = _batch(inside, j, seed, way.batch)
        a = c.to_a(z.detach())
        _, slope = problem.gradient(a, rows, tau)
        if way.penalty:
            slope = slope + way.penalty / scale * torch.einsum("gkm,mg->kg", problem.gram, a)
        if mask is not None:
            slope = slope * mask
        z.grad = c.pull(slope)
        if tau is not None:
            tau.grad = problem.tau_slope.clone()
        for group in optimiser.param_groups:
            group["lr"] = factor * way.lr * _schedule(way, j)
        before = z.detach().clone() if mask is not None else None
        optimiser.step()
        if mask is not None and before is not None:  # models that are not loaded stay where they are
            with torch.no_grad():
                z.copy_(torch.where(mask > 0, z, before))
        now = c.to_a(z.detach())
        if way.average and j >= way.steps // 2:
            total += now
            count += 1
        if way.smooth:
            total += now
            count += 1
        if outside is not None and ((j + 1) % every == 0 or j + 1 == way.steps):
            shown = total / count if count else now
            loss = judged(shown)
            middle = (c.to_a(best_z) + shown) / 2
            if way.halfway and (half := judged(middle)) < min(loss, best.held_out):
                best, best_z = Solved(middle, half, j + 1, start), c.start(middle)
                factor *= 0.5
                with torch.no_grad():
                    z.copy_(best_z)
                optimiser.load_state_dict({**optimiser.state_dict(), "state": {}})
            elif loss < best.held_out:
                best = Solved(shown.clone(), loss, j + 1, start)
                best_z = c.start(shown) if way.smooth else z.detach().clone()
                best_tau = best_tau if tau is None else float(tau.detach())
                factor *= way.advance
                moments = deepcopy(optimiser.state_dict()["state"]) if way.remember == "best" else {}
            elif way.retreat:
                factor *= 0.25 if way.halfway else 0.5
                with torch.no_grad():
                    z.copy_(best_z)
                    if tau is not None:
                        tau.fill_(best_tau)
                if way.remember != "last":
                    optimiser.load_state_dict({**optimiser.state_dict(), "state": deepcopy(moments)})
                if factor <= way.slowest:
                    break
            if way.smooth:
                total, count = torch.zeros_like(start), 0
    if outside is None:
        return Solved(
            total / count if count else c.to_a(z.detach()).clone(), math.nan, stop or way.steps, start
        )
    return best


def _schedule(way: Way, j: int) -> float:
    """Share of the rate at step j: a linear rise, then the cosine's fall."""
    warm = round(way.warmup * way.steps)
    if j < warm:
        return (j + 1) / (warm + 1)
    return 1.0 if way.constant else 0.5 * (1 + math.cos(math.pi * (j - warm) / (way.steps - warm)))


def _factor(problem: Problem, a: Tensor, rows: Tensor) -> float:
    """The factor on the logits with the lowest loss on these rows, to within 4 %."""

    def loss(power: float) -> float:
        return problem.loss_on(a, rows, torch.tensor(math.exp(power)))

    return math.exp(lowest(loss, math.log(0.25), math.log(8.0), 9)[0])


def _next_block(
    problem: Problem, way: Way, a: Tensor, inside: Tensor, done: list[Tensor], generator: torch.Generator
) -> Tensor:
    """(K, 1): one for the models of the next block."""
    assert way.block is not None
    left = torch.ones(problem.K)
    for block in done:
        left[block] = 0
    if way.chosen_blocks:
        _, slope = problem.full_gradient(a, inside[torch.randperm(len(inside), generator=generator)][:512])
        size = (slope.abs().sum(dim=1)).cpu() * left - (1 - left)
        block = size.topk(min(way.block, int(left.sum()))).indices
    else:
        order = torch.randperm(problem.K, generator=generator)
        block = order[left[order] > 0][: way.block]
    done.append(block)
    if sum(len(b) for b in done) >= problem.K:
        done.clear()
    mask = torch.zeros(problem.K, 1, device=a.device)
    mask[block.to(a.device)] = 1
    return mask


def _lbfgs(problem: Problem, way: Way, start: Tensor, inside: Tensor, outside: Tensor) -> Solved:
    c = way.coordinates
    z = c.start(start).contiguous().requires_grad_(True)
    optimiser = torch.optim.LBFGS([z], max_iter=1, history_size=10, line_search_fn="strong_wolfe")
    best = Solved(start, problem.loss_on(start, outside), 0, start)
    scale = float(problem.gram.diagonal(dim1=1, dim2=2).sum(0).mean())

    def closure() -> Tensor:
        a = c.to_a(z.detach())
        loss, slope = problem.full_gradient(a, inside)
        if way.penalty:
            pull = way.penalty / scale * torch.einsum("gkm,mg->kg", problem.gram, a)
            loss = loss + 0.5 * (pull * a).sum()
            slope = slope + pull
        z.grad = c.pull(slope).contiguous()  # as its own views want it
        return loss

    worse = 0
    for j in range(way.steps):
        optimiser.step(closure)  # type: ignore[no-untyped-call]
        now = c.to_a(z.detach())
        loss = problem.loss_on(now, outside)
        if loss < best.held_out:
            best, worse = Solved(now.clone(), loss, j + 1, start), 0
        else:
            worse += 1
        if worse >= 5:
            break
    return best


class Shared(torch.optim.Optimizer):
    """AdamW whose second moment is one number for a tensor: the mean over its elements."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros((), device=p.device))
                state["t"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square().mean(), 0.001)
                m, v = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.999 ** state["t"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * m / (v.sqrt() + 1e-8))


def _batch(rows: Tensor, j: int, seed: int, size: int) -> Tensor:
    per_epoch = len(rows) // size
    if per_epoch == 0:
        return rows
    epoch, place = divmod(j, per_epoch)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    return rows[order[place * size : (place + 1) * size]]
