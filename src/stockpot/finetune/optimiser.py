"""The optimiser of one training run: steps, schedule, and a state that fits safetensors and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from stockpot.finetune.plan import Plan


class Optimiser:
    """AdamW or SGD; linear warm-up, then a cosine to zero; gradients clipped, and scaled for float16."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        steps: int,
        plan: Plan,
        *,
        scaled: bool,
    ) -> None:
        self.parameters = list(parameters)
        self.clip = plan.clip
        # Decay pulls matrices towards zero; biases and gains of norms have no business there.
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizer: torch.optim.Optimizer
        if plan.optimizer == "sgd":
            self._optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
        else:
            self._optimizer = torch.optim.AdamW(groups, lr=lr)
        self._schedule = _schedule(self._optimizer, steps, plan.warmup)
        self._scaler = torch.amp.GradScaler(self.parameters[0].device.type, enabled=scaled)

    def step(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._schedule.step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        saved = self._optimizer.state_dict()
        tensors = {
            f"{number}.{key}": value.detach().clone()
            for number, entries in saved["state"].items()
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }
        rates = [group["lr"] for group in saved["param_groups"]]
        return tensors, {
            "lr": rates,
            "schedule": self._schedule.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        saved = self._optimizer.state_dict()
        saved["state"] = {}
        for name, tensor in tensors.items():
            number, key = name.split(".", 1)
            saved["state"].setdefault(int(number), {})[key] = tensor.clone()
        for group, rate in zip(saved["param_groups"], values["lr"], strict=True):
            group["lr"] = rate
        self._optimizer.load_state_dict(saved)
        self._schedule.load_state_dict(values["schedule"])
        self._scaler.load_state_dict(values["scaler"])


def _schedule(optimizer: torch.optim.Optimizer, steps: int, warmup: float) -> LRScheduler:
    warm = round(warmup * steps)
    after = CosineAnnealingLR(optimizer, T_max=max(1, steps - warm))
    if not warm:
        return after
    rise = LinearLR(optimizer, start_factor=1.0 / (warm + 1), total_iters=warm)
    return SequentialLR(optimizer, [rise, after], milestones=[warm])
