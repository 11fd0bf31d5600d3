"""Five small pools in double precision, and the mixing weights every method gave on them before the rebuild.

`weights.safetensors` was written on 2026-11-18, before the rebuild, and is not written again: it says what the methods
did. The entries that end in `@authors` are what that preset did then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stockpot import Pool, Soup, Task, cook

FEATURES, CLASSES = 6, 3


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)).double()


class Tied(nn.Module):
    """Two names for one weight, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES, bias=False)
        self.outer = nn.Linear(FEATURES, FEATURES, bias=False)
        self.outer.weight = self.inner.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.outer(torch.tanh(self.inner(x))))
        return out


def tied() -> nn.Module:
    return Tied().double()


def deep() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.LayerNorm(FEATURES)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES)).double()


@dataclass(frozen=True)
class Case:
    """One pool and what is set for its learned soups; `crossfit` has its own settings."""

    build: Callable[[], nn.Module]
    models: int
    seed: int
    samples: int = 96
    spread: float = 0.15
    settings: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "mlp": Case(mlp, 6, 0, settings={"block_size": 2, "passes": 2}),
    "normed": Case(normed, 5, 1, settings={"block_size": 3}),
    "tied": Case(tied, 4, 2, settings={"block_size": 2}),
    "uneven": Case(mlp, 8, 3, samples=160, spread=0.3, settings={"block_size": 3}),
    "deep": Case(deep, 5, 4, samples=120, settings={"block_size": 2, "passes": 2}),
}
LEARNED = ("learned", "learned+", "hl", "hl+", "mehl", "mehl+")
PLAIN = ("best", "uniform", "greedy")


def samples(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs whose class a linear rule gives, mostly."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
    rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    noise = torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)
    return x, (x @ rule + 0.5 * noise).argmax(dim=1)


def write_pool(case: Case, folder: Path) -> Pool:
    """Fine-tunes of one base model, nudged apart and trained a little on different data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        base = {name: value.clone() for name, value in case.build().state_dict().items()}
        for k in range(case.models):
            model = case.build()
            model.load_state_dict(base)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=case.spread)
            x, y = samples(24, seed=case.seed * 100 + k + 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.05 * k)
            for _ in range(12):
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
            state = {name: value.detach().contiguous().clone() for name, value in model.state_dict().items()}
            save_file(state, folder / f"model_{k}.safetensors")
    return Pool.open(folder)


def cooked(name: str, methods: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Soup]]:
    """The soup of each of these methods, with its settings, on one of the pools."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        pool = write_pool(case, Path(folder))
        for method, settings in methods.items():
            task = Task(case.build(), samples(case.samples, seed=7), batch_size=64)
            result = cook(pool, task, method, **settings)
            assert result.soup is not None
            yield method, result.soup


def settings_of(name: str) -> dict[str, dict[str, Any]]:
    """What is cooked on a pool: method -> settings."""
    common = {"steps": 40, "batch_size": 32}
    blocks = dict(CASES[name].settings)
    found: dict[str, dict[str, Any]] = {method: {} for method in (*PLAIN, "crossfit")}
    for method in LEARNED:
        found[method] = {**common, **(blocks if method.startswith("mehl") else {})}
    return found
