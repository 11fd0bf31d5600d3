"""The ways others do it, written from their description, to be measured beside ours in the same run."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call


class PublishedStep:
    """MEHL-Soup+ inner step as published: fp32, gradients flattened, one matrix product per tensor, written back."""

    def __init__(self, model: nn.Module, directions: list[list[Tensor]], lr: float = 0.01) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        # Per tensor: (b, n) directions and the fixed part.
        self.D = [torch.stack([d[i].flatten() for d in directions]) for i in range(len(self.names))]
        self.fixed = [p.detach().clone().flatten() for p in model.parameters()]
        self.a = torch.zeros(len(directions), len(self.names), device=self.fixed[0].device)
        self.a.requires_grad_(True)
        self.optimizer = torch.optim.AdamW([self.a], lr=lr, weight_decay=0.1)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.model.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        grad, at = [], 0
        for d in self.D:
            grad.append(d @ flat[at : at + d.shape[1]])
            at += d.shape[1]
        self.a.grad = torch.stack(grad, dim=1)
        self.optimizer.step()
        with torch.no_grad():
            for i, p in enumerate(self.model.parameters()):
                p.copy_((self.fixed[i] + self.a[:, i] @ self.D[i]).view_as(p))
        return loss.detach()


class ClassicLearnedSoup:
    """Learned-Soup+: all K models in host memory, mixed there, autograd through all of them."""

    def __init__(self, model: nn.Module, models: list[list[Tensor]], lr: float = 0.05) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.models = models  # on the host
        self.raw = torch.zeros(len(models), len(self.names), requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.raw], lr=lr, weight_decay=0.0)
        self.device = next(model.parameters()).device

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        W = torch.softmax(self.raw, dim=0)
        mixed = {}
        for i, name in enumerate(self.names):
            mixed[name] = sum(W[k, i] * self.models[k][i] for k in range(len(self.models))).to(self.device)
        loss = nn.functional.cross_entropy(functional_call(self.model, mixed, (x,)), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()
