"""The inner loop of Algorithm 1: the optimiser on one block's coefficients."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from stockpot.engine import parallel
from stockpot.engine.directions import Directions
from stockpot.engine.live import Live
from stockpot.engine.parametrisation import coefficients, pull_back
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


class Descent:
    """Steps on `raw` (b, G) with theta = fixed + sum_k c_k d_k, one graph on the mixed model only."""

    def __init__(
        self,
        live: Live,
        directions: Directions,
        fixed: Tensor,  # (P,) theta_fix of Algorithm 1, line 6
        raw: Tensor,  # (b, G) where to start
        temperature: float | None,
        choices: Choices,
        steps: int,
    ) -> None:
        self.live = live
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
        self.scheduler = self._scheduler(steps)

    def mix(self) -> None:
        """Write the current soup into the model."""
        with torch.no_grad():
            self.directions.mix(self.fixed, coefficients(self.raw, self.simplex), out=self.live.theta)
        self.live.push()

    def gradient(self, data: Data, indices: Tensor) -> Tensor:
        """Fill raw.grad (and temperature.grad) for one batch; returns its mean loss, on the device."""
        task, live = self.live.task, self.live
        self.mix()
        live.clear_gradient()
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=live.dtype, device=live.device)
        mine = parallel.share(indices)
        for piece in mine.chunk(min(self.choices.accumulate, max(1, len(mine)))):
            if not len(piece):
                continue
            loss = task.loss(
                task.to_device(data.batch(piece)),
                label_smoothing=self.choices.label_smoothing,
                temperature=self.temperature,
            ) * (len(piece) / len(indices))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        with torch.no_grad():
            slope = self.directions.project(live.collect_gradient())  # (b, G)
            parallel.add_up([slope, total])
            self.raw.grad = pull_back(self.raw, slope, self.simplex)
            if self.temperature is not None:
                if self.temperature.grad is None:
                    self.temperature.grad = torch.zeros_like(self.temperature)
                parallel.add_up([self.temperature.grad])
        return total

    def step(self, data: Data, indices: Tensor) -> float:
        """One optimiser step; returns the loss before it. A non-finite loss changes nothing."""
        loss = float(self.gradient(data, indices))
        if loss == loss and abs(loss) != float("inf"):
            if self.choices.clip is not None:
                nn.utils.clip_grad_norm_([self.raw], self.choices.clip)
            self.optimizer.step()
            self.scheduler.step()
        return loss

    def _optimizer(self) -> torch.optim.Optimizer:
        c = self.choices
        groups: list[dict[str, Any]] = [{"params": [self.raw], "weight_decay": c.weight_decay}]
        if self.temperature is not None:
            groups.append({"params": [self.temperature], "weight_decay": 0.0})
        if c.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=c.lr, momentum=c.momentum)
        return torch.optim.AdamW(groups, lr=c.lr)

    def _scheduler(self, steps: int) -> LRScheduler:
        warm = round(self.choices.warmup * steps)
        rest = max(1, steps - warm)
        after: LRScheduler = (
            CosineAnnealingLR(self.optimizer, T_max=rest)
            if self.choices.schedule == "cosine"
            else ConstantLR(self.optimizer, factor=1.0, total_iters=1)
        )
        if not warm:
            return after
        rise = LinearLR(self.optimizer, start_factor=1.0 / (warm + 1), total_iters=warm)
        return SequentialLR(self.optimizer, [rise, after], milestones=[warm])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything the next step depends on, as tensors and JSON values."""
        tensors = {"raw": self.raw.detach().clone()}
        if self.temperature is not None:
            tensors["temperature"] = self.temperature.detach().clone()
        saved = self.optimizer.state_dict()
        for number, entries in saved["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{number}.{key}"] = value.clone()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
        return tensors, {"groups": groups, "scheduler": self.scheduler.state_dict()}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        with torch.no_grad():
            self.raw.copy_(tensors["raw"])
            if self.temperature is not None:
                self.temperature.copy_(tensors["temperature"])
        saved = self.optimizer.state_dict()
        saved["state"] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                saved["state"].setdefault(int(number), {})[key] = tensor.clone()
        for group, values_of in zip(saved["param_groups"], values["groups"], strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in values_of.items()})
        self.optimizer.load_state_dict(saved)
        self.scheduler.load_state_dict(values["scheduler"])
