"""AdamW on the coefficients of one block, and on beta where it is learned; and a step as one CUDA graph.

Written out instead of `torch.optim.AdamW` for two reasons. All that a step changes lies in tensors at fixed places, so
that a captured CUDA graph can take the step. And a step whose loss, gradient or outcome is not finite changes nothing,
without asking the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log

import torch
from torch import Tensor

from stockpot.engine.live import Live
from stockpot.task.captured import Batch, Captured, DeviceBatches

TakeStep = Callable[[Tensor, Batch], Tensor]  # (rate, batch) -> (2,) loss and whether it was skipped, on the device

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
NAMES = ("x", "m", "v", "count", "total", "taken")


class AdamW:
    """x holds the n = b * G coefficients and, behind them, beta; `alpha` and `beta` are views of it."""

    def __init__(self, alpha: Tensor, beta: float | None, weight_decay: float) -> None:
        b, G = alpha.shape
        end = [] if beta is None else [torch.tensor([beta], dtype=alpha.dtype, device=alpha.device)]
        self.x = torch.cat([alpha.reshape(-1), *end])  # (n,)
        self.alpha = self.x[: b * G].view(b, G)
        self.beta = None if beta is None else self.x[-1]
        self.m, self.v = torch.zeros_like(self.x), torch.zeros_like(self.x)  # AdamW's moments
        self.count = self.x.new_zeros(())  # steps AdamW has taken
        self.total = torch.zeros_like(self.x)  # sum of x over the steps since the last judgement
        self.taken = self.x.new_zeros(())  # how many those are
        self.weight_decay = weight_decay
        self._decay = torch.full_like(self.x, weight_decay)
        self._decay[b * G :] = 0.0

    def step(self, loss: Tensor, slope: Tensor, slope_beta: Tensor | None, rate: Tensor) -> Tensor:
        """One step down the slope (b, G); returns (loss, whether it was skipped), on the device."""
        with torch.no_grad():
            g = slope.reshape(-1) if slope_beta is None else torch.cat([slope.reshape(-1), slope_beta.view(1)])
            n = self.count + 1
            x, m, v = self.update(g, rate, n)
            # Squares, because the moments have them too.
            sound = torch.isfinite(loss * 0 + g.square().sum() + (x * 0).sum())
            for old, new in ((self.x, x), (self.m, m), (self.v, v), (self.count, n)):
                old.copy_(torch.where(sound, new, old))
            self.total.add_(torch.where(sound, self.x, torch.zeros_like(self.x)))
            self.taken.add_(sound.to(self.taken.dtype))
            return torch.stack([loss, (~sound).to(loss.dtype)])

    def update(self, g: Tensor, rate: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What x and the moments m and v would be after step n, down the gradient g: all that another rule replaces."""
        m = self.m.lerp(g, 1 - BETA1)
        v = self.v * BETA2 + (1 - BETA2) * g * g
        first = -torch.expm1(n * log(BETA1))  # 1 - BETA1^n
        second = -torch.expm1(n * log(BETA2))
        return self.x * (1 - rate * self._decay) - (rate / first) * m / (v.sqrt() / second.sqrt() + EPS), m, v

    def values(self) -> tuple[Tensor, float | None]:
        """The coefficients (b, G) and beta, on the host."""
        return self.alpha.to("cpu", copy=True), None if self.beta is None else float(self.beta)

    def save(self) -> dict[str, Tensor]:
        """Copies on the host of all that the next step depends on."""
        return {name: getattr(self, name).to("cpu", copy=True) for name in NAMES}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        for name in NAMES:
            getattr(self, name).copy_(saved[name])


def with_mean(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was saved, with the mean of the steps since the last judgement for x; their sum begins anew in both."""
    mean = saved["total"] / saved["taken"] if saved["taken"] > 0 else saved["x"]
    for name in ("total", "taken"):
        saved[name] = torch.zeros_like(saved[name])
    return {**saved, "x": mean}


class CapturedStep:
    """The same step as one CUDA graph; it changes the optimiser's tensors in place."""

    def __init__(self, live: Live, step: TakeStep, optimiser: AdamW, batches: DeviceBatches) -> None:
        self.optimiser, self.batches = optimiser, batches
        self._rate = torch.zeros((), dtype=optimiser.x.dtype, device=live.device)
        before = optimiser.save()
        batches.put(torch.arange(batches.batch.size))
        try:
            self._take = Captured(lambda: step(self._rate, batches.batch), live.device, between=live.clear_gradient)
        finally:  # also where it fails: the steps that were tried must not count
            optimiser.load(before)

    def __call__(self, rate: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002  (it lies where the graph reads it)
        self._rate.copy_(rate)
        found: Tensor = self._take()
        return found.clone()
