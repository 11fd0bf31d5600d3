"""Small pools and tasks: one base model, K fine-tunes of it, data that tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stockpot.engine import Live
from stockpot.events import Listener, ignore
from stockpot.layout import Layout
from stockpot.pool import Pool
from stockpot.soups.fold import Fold
from stockpot.soups.learn import Learner
from stockpot.soups.problem import Problem, StateStore
from stockpot.soups.registry import METHODS, preset_for, settings_for
from stockpot.soups.result import Result, decided
from stockpot.task import Task

FEATURES, CLASSES = 6, 3


def mlp(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


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


def samples(n: int = 48, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs whose class a linear rule gives, mostly."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
    rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    noise = torch.randn(n, CLASSES, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x @ rule + 0.5 * noise).argmax(dim=1)


def fine_tunes(
    build: Callable[[], nn.Module], count: int, *, seed: int = 0, steps: int = 12, spread: float = 0.15
) -> list[dict[str, Tensor]]:
    """State dicts of one base model, nudged apart and trained a little on different data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = build().state_dict()
        base = {name: value.clone() for name, value in base.items()}
        states = []
        for k in range(count):
            model = build()
            model.load_state_dict(base)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=spread)
            model.train()
            x, y = samples(24, seed=seed * 100 + k + 1, dtype=next(model.parameters()).dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.05 * k)
            for _ in range(steps):
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
            states.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        return states


def write(folder: Path, states: Sequence[Mapping[str, Tensor]], names: Sequence[str] = ()) -> Pool:
    """A pool of safetensors files `model_0`, `model_1`, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    names = names or [f"model_{k}" for k in range(len(states))]
    paths = [folder / f"{name}.safetensors" for name in names]
    for path, state in zip(paths, states, strict=True):
        save_file({name: value.contiguous().clone() for name, value in state.items()}, path)
    return Pool.open(paths)


def zoo(
    folder: Path, count: int = 4, *, build: Callable[[], nn.Module] = mlp, seed: int = 0, **task: Any
) -> tuple[Pool, Task]:
    pool = write(folder, fine_tunes(build, count, seed=seed))
    return pool, Task(build(), samples(), **task)


MARK = 1e4  # an input that large makes the loss of its batch NaN


def uneven(folder: Path, models: int = 6) -> tuple[Pool, Task]:
    """A zoo whose greedy soup leaves some ingredients out."""
    return write(folder, fine_tunes(mlp, models, seed=3)), Task(mlp(), samples())


def one_good_model(folder: Path) -> tuple[Pool, Task]:
    good = fine_tunes(mlp, 1, steps=300, spread=0.0)[0]
    noise = torch.Generator().manual_seed(0)
    bad = [{n: v + 3 * torch.randn(v.shape, generator=noise) for n, v in good.items()} for _ in range(3)]
    return write(folder, [bad[0], good, *bad[1:]]), Task(mlp(), samples(60))


def guard_of(result: Result) -> dict[str, Any]:
    """What its guard has found and chosen."""
    return dict(next(h for h in result.history if h["kind"] == "guard"))


def weights_of(result: Result) -> Tensor:
    """W of the soup that was cooked. (K, G)"""
    assert result.soup is not None
    return result.soup.W


def marked_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    loss = nn.functional.cross_entropy(model(x.clamp(-9, 9)), y)
    return torch.where((x == MARK).any(), torch.full_like(loss, torch.nan), loss)


def marked(count: int, n: int = 48, device: str = "cpu") -> Task:
    """A task whose last samples spoil every batch they are in, on any device and inside a captured graph."""
    x, y = samples(n)
    x[n - count :, 0] = MARK  # not the first, on which the loss is tried before learning begins
    return Task(mlp().to(device), (x, y), loss=marked_loss, batch_size=8)


@contextmanager
def learning(
    pool: Pool, task: Task, method: str, *, preset: str | None = None, store: StateStore | None = None, **settings: Any
) -> Iterator[Learner]:
    """A learner on all fitting data, ready to run."""
    chosen = settings_for(method, preset, **settings)
    problem = Problem(pool, task)
    with problem.live(problem.layout(chosen.granularity)) as live:
        yield Learner(problem, live, METHODS[method], chosen, [Fold(0, task.fit)], store)


def decide(
    pool: Pool,
    task: Task,
    method: str,
    *,
    preset: str | None = None,
    store: StateStore | None = None,
    listen: Listener = ignore,
    **settings: Any,
) -> Result:
    """What `cook` does up to the report data, with a place to keep the state of an unfinished method."""
    chosen = settings_for(method, preset, **settings)
    return decided(Problem(pool, task, listen=listen), method, chosen, preset_for(method, preset), store)


def flat(live: Live, state: Mapping[str, Tensor]) -> Tensor:
    """A state dict in the order of the live model's vector. (P,)"""
    return torch.cat([state[slot.names[0]].reshape(-1).to(live.dtype) for slot in live.plan.slots])


def layout_of(pool: Pool, granularity: str = "tensor", **options: Any) -> Layout:
    return Layout.of(pool, granularity, facts=pool.facts(), **options)


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )
