"""preset="authors": what the paper's released code does, in plain PyTorch.

It differs from the paper's text (soups/mehl.py) in the following, block by block:

- The centre is the mean of the first block's models, and from the second block on the soup so far.
- Directions theta_k - centre are scaled to norm one, per group of tensors.
- Coefficients begin at zero in every block; AdamW has no weight decay.
- The rate rises by (s + 1) / w over the first w = J / 5 steps, and falls by a cosine after that.
- Before it is projected, the gradient of a vision transformer is clipped: all parameters together to norm one.
- The model is in training mode: dropout is on.

With a direction s_k (theta_k - centre) and W_centre the mixing weights of the centre, a coefficient x_k adds
x_k s_k (e_k - W_centre) to W. theta follows from W, so the state is W and, within a block, AdamW's. The code in the
release does not run (docs/decisions.md); where their directions would be divided by zero, ours are zero.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.engine import Live
from stockpot.engine.directions import mix, project
from stockpot.errors import LearningError, MethodError, describe
from stockpot.events import Event
from stockpot.signals import held
from stockpot.soup import weights
from stockpot.soups.fold import check_same_settings
from stockpot.soups.problem import Decision, Problem, StateStore, finite
from stockpot.soups.registry import Method
from stockpot.soups.settings import Settings, as_json, steps_for
from stockpot.task.data import forked_random
from stockpot.task.normalisation import modes_restored

WARMUP = 0.2  # of the steps
MELTED = "preset authors scales directions to norm one: full weights were made of the adapters for it"
CLIP = 1.0  # norm of a vision transformer's gradient


@dataclass
class _Progress:
    W: Tensor  # (K, G) of the centre of the block under way
    t: int = 0  # blocks finished
    j: int = 0  # steps taken in block t
    optimiser: dict[str, Tensor] = field(default_factory=dict)  # x and AdamW's state after j steps
    history: list[tuple[int, int, float, float]] = field(default_factory=list)  # block, step, loss, rate


def authors_soup(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:
    if problem.task.sharded:
        raise MethodError.of(
            f"preset 'authors' with method {method.name!r}",
            expected="a model that every rank has all of",
            found="parallel: shards",
            fix="leave the preset out, or parallel: shards",
        )
    layout = problem.layout(settings.granularity)
    blocks = problem.blocks(settings)
    s = _Progress(weights.chosen(len(problem.pool), len(layout), blocks[0]))
    _restore(s, settings, store)
    with problem.live(layout, factored=False) as live, modes_restored(problem.task.model), held() as stop:
        problem.task.model.train()
        for parameter in problem.task.model.parameters():
            parameter.requires_grad_(parameter.dtype.is_floating_point)  # all of them count when clipping
        saved_at = time.monotonic()
        while s.t < len(blocks):
            block = blocks[s.t]
            names = [problem.pool.names[k] for k in block]
            problem.listen(Event("block", {"block": s.t, "of": len(blocks), "models": names}))
            centre = live.mixed(s.W)  # (P,)
            D, scale = _directions(live, block, centre)
            x = torch.zeros(len(block), len(layout), dtype=live.dtype, device=live.device, requires_grad=True)
            optimiser = torch.optim.AdamW([x], lr=settings.lr, weight_decay=settings.weight_decay)
            _load(optimiser, x, s.optimiser)
            for loss, rate in _steps(problem, live, settings, s, D, centre, x, optimiser):
                s.history.append((s.t, s.j - 1, loss, rate))
                of = steps_for(settings, len(problem.task.fit))
                step = {"block": s.t, "fold": 0, "step": s.j - 1, "of": of, "loss": loss, "lr": rate}
                problem.listen(Event("step", step))
                if not math.isfinite(loss):
                    raise _not_finite(s, len(blocks), loss)
                live.check_bound()
                if store is not None and (stop.asked or time.monotonic() - saved_at > store.interval):
                    s.optimiser = _state(optimiser, x)
                    _save(s, settings, store)
                    saved_at = time.monotonic()
                stop.obey()
            s.W = _followed(s.W, block, x.detach(), scale)
            s.t, s.j, s.optimiser = s.t + 1, 0, {}
            if store is not None:
                _save(s, settings, store)
            stop.obey()
    history = tuple(
        {"kind": "step", "block": t, "fold": 0, "step": j, "loss": finite(loss), "lr": rate}
        for t, j, loss, rate in s.history
    )
    notes = () if problem.pool.adapters is None else (MELTED,)
    return Decision(s.W, layout, history=history, notes=notes)


def _steps(
    problem: Problem,
    live: Live,
    settings: Settings,
    s: _Progress,
    D: Tensor,  # (b, P)
    centre: Tensor,  # (P,)
    x: Tensor,  # (b, G)
    optimiser: torch.optim.Optimizer,
) -> Any:
    """The inner loop; yields each step's loss and rate."""
    task, bounds = problem.task, live.plan.bounds
    J = steps_for(settings, len(task.fit))
    clipped = is_transformer(task.model)
    with forked_random(live.device) as reseed:
        while s.j < J:
            i = s.t * J + s.j
            reseed((settings.seed * 1009 * 1_000_000_007 + i) % 2**63)
            live.theta.copy_(centre + mix(D, x.detach(), bounds))
            live.push()
            task.model.zero_grad(set_to_none=True)
            indices = task.fit.order(settings.seed * 1009, i, settings.batch_size)
            sums = torch.zeros(2, device=live.device)  # of losses and of their weights
            for piece in indices.chunk(settings.accumulate):
                loss = task.loss(task.to_device(task.fit.batch(piece)))
                (loss.total / len(indices)).backward()  # type: ignore[no-untyped-call]
                sums = sums + torch.stack([loss.total.detach(), loss.weight.to(loss.total)])
            for parameter in task.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= (len(indices) / sums[1]).to(parameter.grad)
            if clipped:
                nn.utils.clip_grad_norm_(task.model.parameters(), CLIP)
            x.grad = project(D, live.collect_gradient().to(live.dtype), bounds)
            rate = settings.lr * factor(s.j, J)
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
            s.j += 1
            yield float(sums[0] / sums[1]), rate
    task.model.zero_grad(set_to_none=True)


def factor(step: int, steps: int) -> float:
    """On the learning rate: linear warm-up, then half a cosine."""
    warm = int(WARMUP * steps)
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


def is_transformer(model: nn.Module) -> bool:
    """The release asks whether the architecture's name has "vit" in it; we ask for attention layers."""
    return any("attention" in type(module).__name__.lower() for module in model.modules())


def _directions(live: Live, block: list[int], centre: Tensor) -> tuple[Tensor, Tensor]:
    """Directions (b, P) of norm one in every group, and what they were multiplied by, (b, G)."""
    D = torch.stack([live.read(k, torch.empty_like(centre)) for k in block]).sub_(centre)
    scale = torch.empty(len(block), live.plan.groups, dtype=D.dtype, device=D.device)
    for j, (start, stop) in enumerate(live.plan.bounds):
        norm = D[:, start:stop].norm(dim=1)  # (b,)
        scale[:, j] = torch.where(norm > 0, 1 / norm, torch.zeros_like(norm))
        D[:, start:stop] *= scale[:, j, None]
    return D, scale


def _followed(W: Tensor, block: list[int], x: Tensor, scale: Tensor) -> Tensor:
    """W (K, G) after the block's coefficients x (b, G) were learned from the centre of weights W."""
    change = (x * scale).double().cpu()  # (b, G)
    after = W - W * change.sum(dim=0, keepdim=True)
    after[block] += change
    return after


def _not_finite(s: _Progress, blocks: int, loss: float) -> LearningError:
    return LearningError(
        describe(
            f"learning at block {s.t + 1} of {blocks}, step {s.j}",
            expected="a finite loss",
            found=f"loss {loss}",
            fix="lower lr, or leave preset='authors' out: it skips no step, as the released code does not",
        ),
        best=s.W,
    )


# State ---------------------------------------------------------------------------------------------------


def _state(optimiser: torch.optim.Optimizer, x: Tensor) -> dict[str, Tensor]:
    found = {"x": x.detach().to("cpu", copy=True)}
    return found | {name: value.to("cpu", copy=True) for name, value in optimiser.state[x].items()}


def _load(optimiser: torch.optim.Optimizer, x: Tensor, saved: dict[str, Tensor]) -> None:
    if saved:
        with torch.no_grad():
            x.copy_(saved["x"])
        optimiser.state[x] = {
            name: value.clone() if name == "step" else value.to(x) for name, value in saved.items() if name != "x"
        }


def _save(s: _Progress, settings: Settings, store: StateStore) -> None:
    tensors = {"W": s.W.clone(), "history": torch.tensor(s.history, dtype=torch.float64).reshape(-1, 4)}
    tensors |= {f"optimiser.{name}": value for name, value in s.optimiser.items()}
    store.save(tensors, {"settings": as_json(settings), "preset": "authors", "t": s.t, "j": s.j})


def _restore(s: _Progress, settings: Settings, store: StateStore | None) -> None:
    saved = None if store is None else store.load()
    if saved is None:
        return
    tensors, values = saved
    check_same_settings(
        {**values["settings"], "preset": values.get("preset")}, {**as_json(settings), "preset": "authors"}
    )
    s.W, s.t, s.j = tensors["W"], values["t"], values["j"]
    s.history = [(int(t), int(j), loss, rate) for t, j, loss, rate in tensors["history"].tolist()]
    s.optimiser = {
        name.removeprefix("optimiser."): value for name, value in tensors.items() if name.startswith("optimiser.")
    }
