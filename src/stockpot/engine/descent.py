"""The inner loop of Algorithm 1: the optimiser on one block's coefficients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from stockpot.engine import parallel
from stockpot.engine.directions import Directions
from stockpot.engine.live import Live
from stockpot.engine.low_memory import Projector
from stockpot.engine.parametrisation import coefficients, pull_back
from stockpot.engine.trail import Trail
from stockpot.task import Data


class Choices(Protocol):
    """The settings a descent reads (methods/settings.py has them all)."""

    @property
    def parametrisation(self) -> str: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float | None: ...
    @property
    def label_smoothing(self) -> float: ...
    @property
    def smooth(self) -> bool: ...


class Step(NamedTuple):
    """What one step found."""

    loss: float  # of its batch, before the step
    skipped: bool  # something was not finite, and nothing was changed


class Descent:
    """Steps on `raw` (b, G) with theta = fixed + sum_k c_k d_k, one graph on the mixed model only."""

    burst = 1  # steps worth asking for at once
    path = "eager"

    def __init__(
        self,
        live: Live,
        directions: Directions,
        fixed: Tensor,  # (P,) theta_fix of Algorithm 1, line 6
        raw: Tensor,  # (b, G) where to start
        temperature: float | None,
        choices: Choices,
        steps: int,
        *,
        accumulate: int | None = None,  # None: as chosen; the memory plan may cut finer
        low_memory: bool = False,
    ) -> None:
        self.live = live
        self.accumulate = accumulate or choices.accumulate
        self.directions = directions
        self.fixed = fixed
        self.choices = choices
        self.simplex = choices.parametrisation == "simplex"
        self.raw = nn.Parameter(raw.to(live.device, live.dtype).clone())
        self.temperature = (
            None
            if temperature is None
            else nn.Parameter(torch.tensor(temperature, dtype=live.dtype, device=live.device))
        )
        self.optimizer = self._optimizer()
        self.rates = learning_rates(choices, steps)
        self.factor = 1.0  # on every rate; less than one after a setback
        self.done = 0  # steps taken or skipped
        self.trail = Trail(self.raw, self.temperature) if choices.smooth else None
        self.projector = Projector(live, directions) if low_memory else None

    def mix(self, raw: Tensor | None = None) -> None:
        """Write the soup of these coefficients, or of the current ones, into the model."""
        with torch.no_grad():
            c = coefficients(self.raw if raw is None else raw.to(self.raw), self.simplex)
            if self.directions.fast and not self.live.copied:
                self.directions.mix(
                    self.fixed, c, out=self.live.flat
                )  # rounds to the model's dtype on the way
            else:
                self.directions.mix(self.fixed, c, out=self.live.theta)
                self.live.push()

    def gradient(self, data: Data, indices: Tensor) -> Tensor:
        """Fill raw.grad (and temperature.grad) for one batch; returns its mean loss, on the device."""
        mine = parallel.share(indices)
        pieces = mine.chunk(min(self.accumulate, max(1, len(mine))))
        to_device = self.live.task.to_device
        return self._backward([(to_device(data.batch(p)), len(p)) for p in pieces if len(p)], len(indices))

    def _backward(self, batches: list[tuple[Any, int]], size: int) -> Tensor:
        """The same for batches on the device: the pieces, with their sizes, of a batch of `size` samples in all."""
        task, live = self.live.task, self.live
        self.mix()
        live.clear_gradient()
        self.optimizer.zero_grad()
        if self.projector is not None:
            self.projector.begin()
        total = torch.zeros((), dtype=live.dtype, device=live.device)
        for batch, samples in batches:
            loss = task.loss(
                batch, label_smoothing=self.choices.label_smoothing, temperature=self.temperature
            ) * (samples / size)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        with torch.no_grad():
            slope = (
                self.projector.finish()
                if self.projector
                else self.directions.project(live.collect_gradient())
            )
            slope = slope.to(live.dtype)  # (b, G)
            parallel.add_up([slope, total])
            self.raw.grad = pull_back(self.raw, slope, self.simplex)
            if self.temperature is not None:
                if self.temperature.grad is None:
                    self.temperature.grad = torch.zeros_like(self.temperature)
                parallel.add_up([self.temperature.grad])
        return total

    def run(self, data: Data, batches: list[Tensor]) -> list[Step]:
        """One optimiser step for each batch of indices.

        A step whose loss, gradient or coefficients are not finite is skipped: coefficients, moments and the
        optimiser's own count stay as they were. The schedule goes on.
        """
        return [self._step(data, indices) for indices in batches]

    def _step(self, data: Data, indices: Tensor) -> Step:
        loss = self.gradient(data, indices)
        value, health = torch.stack([loss, self._health(loss)]).tolist()  # one wait for the device
        skipped = not math.isfinite(health)
        if not skipped:
            self._clip()
            for group in self.optimizer.param_groups:
                group["lr"] = self.rates[self.done] * self.factor
            self.optimizer.step()
            if self.trail is not None:
                self.trail.add()
        self.done += 1
        return Step(value, skipped)

    def _clip(self) -> None:
        if self.choices.clip is not None:
            nn.utils.clip_grad_norm_([self.raw], self.choices.clip)

    def _health(self, loss: Tensor) -> Tensor:
        """A number on the device that is finite exactly when this step can be taken.

        Squares, because the optimiser squares gradients too: one that overflows there would stay for ever.
        """
        with torch.no_grad():
            health = loss * 0 + (self.raw * 0).sum()
            for parameter in (self.raw, self.temperature):
                if parameter is not None and parameter.grad is not None:
                    health = health + parameter.grad.square().sum()
        return health

    def slow(self, factor: float) -> None:
        """Take every rate of the schedule times this."""
        self.factor = factor

    def go_back(self, raw: Tensor, temperature: float | None, done: int) -> None:
        """Other coefficients and a fresh optimiser after `done` steps of the schedule."""
        with torch.no_grad():
            self.raw.copy_(raw)
            if self.temperature is not None and temperature is not None:
                self.temperature.fill_(temperature)
        self._forget()
        if self.trail is not None:
            self.trail.begin()
        self.done = done

    def _forget(self) -> None:
        self.optimizer.state.clear()

    def close(self) -> None:
        """Take the hooks off the model."""
        if self.projector is not None:
            self.projector.close()

    def _groups(self) -> list[dict[str, Any]]:
        """What the optimiser moves."""
        groups: list[dict[str, Any]] = [
            {"params": [self.raw], "weight_decay": self.choices.weight_decay},
        ]
        if self.temperature is not None:
            groups.append({"params": [self.temperature], "weight_decay": 0.0})
        return groups

    def _optimizer(self) -> torch.optim.Optimizer:
        c, groups = self.choices, self._groups()
        if c.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=c.lr, momentum=c.momentum)
        return torch.optim.AdamW(groups, lr=c.lr)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything the next step depends on, as tensors and JSON values."""
        tensors = {"raw": self.raw.detach().cpu().clone()}
        if self.temperature is not None:
            tensors["temperature"] = self.temperature.detach().cpu().clone()
        for number, entries in self.optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{number}.{key}"] = value.cpu().clone()
        if self.trail is not None:
            tensors |= {
                f"trail.{place}": total.cpu().clone() for place, total in enumerate(self.trail.totals)
            }
        return tensors, {"done": self.done}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.done = int(values["done"])
        with torch.no_grad():
            self.raw.copy_(tensors["raw"])
            if self.temperature is not None:
                self.temperature.copy_(tensors["temperature"])
        if self.trail is not None:
            self.trail.restore(tensors)
        saved = self.optimizer.state_dict()
        saved["state"] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                saved["state"].setdefault(int(number), {})[key] = tensor.clone()
        self.optimizer.load_state_dict(saved)


def learning_rates(choices: Choices, steps: int) -> list[float]:
    """The rate of every step: linear warm-up, then cosine or constant."""
    nothing = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=choices.lr)
    warm = round(choices.warmup * steps)
    scheduler: LRScheduler = (
        CosineAnnealingLR(nothing, T_max=max(1, steps - warm))
        if choices.schedule == "cosine"
        else ConstantLR(nothing, factor=1.0, total_iters=1)
    )
    if warm:
        rise = LinearLR(nothing, start_factor=1.0 / (warm + 1), total_iters=warm)
        scheduler = SequentialLR(nothing, [rise, scheduler], milestones=[warm])
    rates = []
    for _ in range(steps):
        rates.append(float(nothing.param_groups[0]["lr"]))
        nothing.step()
        scheduler.step()
    return rates
