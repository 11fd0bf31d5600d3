"""Five small pools in double precision, and the mixing weights every method gave on them before the rebuild.

`pools.safetensors` holds models and samples: a processor that rounds a last digit otherwise while training them would
change their digests, and digests order the blocks. `weights.safetensors` was written from it by the code of 2026-11-18,
before the rebuild (commit a1cf849): it says what the methods did. Only `crossfit` was changed on purpose since, and
written again (docs/decisions.md).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stockpot import Pool, Soup, Task, cook

FEATURES, CLASSES = 6, 3
KEPT = load_file(Path(__file__).parent / "pools.safetensors")


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
    """One pool's model, and what is set for its learned soups; `crossfit` has its own settings."""

    build: Callable[[], nn.Module]
    models: int
    settings: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "mlp": Case(mlp, 6, settings={"block_size": 2, "passes": 2}),
    "normed": Case(normed, 5, settings={"block_size": 3}),
    "tied": Case(tied, 4, settings={"block_size": 2}),
    "uneven": Case(mlp, 8, settings={"block_size": 3}),
    "deep": Case(deep, 5, settings={"block_size": 2, "passes": 2}),
}
LEARNED = ("learned", "learned+", "hl", "hl+", "mehl", "mehl+")
PLAIN = ("best", "uniform", "greedy")


def write_pool(name: str, folder: Path) -> Pool:
    """The models of a pool, each as a file."""
    for k in range(CASES[name].models):
        save_file(_kept(f"{name}/{k}/"), folder / f"model_{k}.safetensors")
    return Pool.open(folder)


def _kept(prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in KEPT.items() if key.startswith(prefix)}


def cooked(name: str, methods: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Soup]]:
    """The soup of each of these methods, with its settings, on one of the pools."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        pool = write_pool(name, Path(folder))
        for method, settings in methods.items():
            task = Task(case.build(), (KEPT[f"{name}/x"], KEPT[f"{name}/y"]), batch_size=64)
            result = cook(pool, task, method, **settings)
            assert result.soup is not None
            yield method, result.soup


def settings_of(name: str) -> dict[str, dict[str, Any]]:
    """What is cooked on a pool: method -> settings."""
    common = {"steps": 40, "batch_size": 32}
    blocks = dict(CASES[name].settings)
    found: dict[str, dict[str, Any]] = {**{method: {} for method in PLAIN}, "crossfit": {"steps": 60}}
    for method in LEARNED:
        found[method] = {**common, **(blocks if method.startswith("mehl") else {})}
    return found
