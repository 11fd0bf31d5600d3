"""The classic way to learn a soup: all K models in memory and autograd through all of them.

What the learner's gradients are tested against.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stockpot.layout import EXCLUDED, FROZEN, Layout, mixing_dtype
from stockpot.pool import Pool
from stockpot.soups.settings import Settings, steps_for
from stockpot.task import Task


class _Loss(nn.Module):
    """The task's loss as a module, so that functional_call can give its model other weights."""

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = task.model
        self._task = task
        self._options = options

    def forward(self, batch: Any) -> Tensor:
        return self._task.loss(self._task.to_device(batch), **self._options).mean


class Classic:
    """Learned-Soup (`simplex`) and HL-Soup as one graph from the coefficients through K models to the loss."""

    def __init__(self, pool: Pool, task: Task, layout: Layout, *, simplex: bool) -> None:
        self.task = task
        self.layout = layout
        self.simplex = simplex
        dtypes = [mixing_dtype(pool.specs[name].dtype) for name in layout.group_of]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.models = {  # name -> (K, *shape)
            name: torch.stack([pool.tensor(k, name).to(task.device, self.dtype) for k in range(len(pool))])
            for name in layout.group_of
        }
        self.kept = {
            name: pool.tensor(layout.donor, name).to(task.device)
            for name, reason in layout.kept.items()
            if reason in (FROZEN, EXCLUDED)
        }
        self.raw = nn.Parameter(  # (K, G)
            torch.zeros(len(pool), len(layout), dtype=self.dtype, device=task.device)
        )

    def weights(self) -> Tensor:
        """Mixing weights with their graph. (K, G)"""
        if self.simplex:
            return torch.softmax(self.raw, dim=0)
        return 1.0 / len(self.raw) + self.raw - self.raw.mean(dim=0)

    def loss(self, indices: Tensor, **options: Any) -> Tensor:
        """Mean loss of the mixed model on samples of the fitting data; options of `Task.loss`."""
        W = self.weights()
        own = dict(self.task.model.named_parameters()) | dict(self.task.model.named_buffers())
        mixed = {
            name: torch.tensordot(W[:, self.layout.group_of[name]], stack, dims=1)
            for name, stack in self.models.items()
        }
        given = {f"model.{n}": v.to(own[n].dtype) for n, v in (mixed | self.kept).items() if n in own}
        batch = self.task.fit.batch(indices)
        return functional_call(_Loss(self.task, options), given, (batch,))  # type: ignore[no-any-return]

    def gradient(self, indices: Tensor, **options: Any) -> Tensor:
        """d loss / d raw by autograd through the whole graph. (K, G)"""
        with self.task.learning():
            return torch.autograd.grad(self.loss(indices, **options), self.raw)[0]

    def learn(self, settings: Settings) -> list[float]:
        """AdamW on all coefficients at a rate that falls by a cosine; returns the losses."""
        optimizer = torch.optim.AdamW([self.raw], settings.lr, weight_decay=settings.weight_decay)
        fit = self.task.fit
        steps = steps_for(settings, len(fit))
        losses = []
        with self.task.learning():
            for step in range(steps):
                indices = fit.order(settings.seed * 1009, step, settings.batch_size)
                for group in optimizer.param_groups:
                    group["lr"] = settings.lr * (1 + cos(pi * step / steps)) / 2
                optimizer.zero_grad()
                loss = self.loss(indices)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(float(loss.detach()))
        return losses
