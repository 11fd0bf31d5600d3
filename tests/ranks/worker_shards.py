"""Run by a test: the same cooking by several ranks, with the model divided among all of them, or among some.

The ranks are forked from one process that has imported everything: FSDP2 brings seconds of imports.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard  # noqa: F401  (imported before the fork)

from stockpot import Pool, StockpotError, Task, compare, cook
from zoo import CLASSES, FEATURES, samples


class Blocks(nn.Module):
    """Rows that 2 and 4 ranks do not divide, and a block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, CLASSES)
        self.register_buffer("offset", torch.full((7,), 0.1))

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = x + torch.tanh(block(x)) + self.get_buffer("offset")
        out: Tensor = self.norm(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


RUNS: dict[str, dict[str, Any]] = {
    "hl+ by two and two": {"method": "hl+", "shards": 2},
    "hl+": {"method": "hl+"},
    "mehl+": {"method": "mehl+", "block_size": 2},
    "mehl+ in fp32": {"method": "mehl+", "block_size": 2, "dtype": torch.float32},
    "learned+": {"method": "learned+"},
    "learned+ by two and two": {"method": "learned+", "shards": 2},
    "crossfit": {"method": "crossfit", "folds": 2},
    "crossfit by two and two": {"method": "crossfit", "folds": 2, "shards": 2},
    "greedy": {"method": "greedy"},
    "one sample per batch": {"method": "mehl", "batch_size": 1, "steps": 3},  # ranks without any
    "two samples per batch": {"method": "hl", "batch_size": 2, "steps": 3, "shards": 2},
    "accumulated": {"method": "hl", "batch_size": 5, "accumulate": 3, "steps": 3},  # unequal numbers of pieces
    "low-memory mode": {"method": "hl", "low_memory": True, "steps": 3},
}


def task_of(dtype: torch.dtype = torch.float64, **more: Any) -> Task:
    data = [samples(83, dtype=dtype), samples(45, seed=1, dtype=dtype)]
    return Task(Blocks().to(dtype), *data, batch_size=10, **more)


def run(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    """The soup and all scores; alone, unless `parallel` is given."""
    chosen = dict(RUNS[name])
    dtype = chosen.pop("dtype", torch.float64)
    pool, task = Pool.open(folder / str(dtype).removeprefix("torch.")), task_of(dtype)
    settings: dict[str, Any] = {"steps": 6, "batch_size": 21, "lr": 0.05, **chosen, **more}
    if not more:
        settings.pop("shards", None)
    result = cook(pool, task, **settings)
    assert result.soup is not None
    assert result.fit is not None
    assert task.sharded == bool(more)
    return {
        "W": result.soup.W,
        "fit": result.fit.table,
        "loss": torch.tensor(result.fit.loss),
        "report": result.reports["report"].table,
        **({} if result.held_out is None else {"held_out": result.held_out.table}),
        **({} if "beta" not in result.soup.about else {"beta": torch.tensor(result.soup.about["beta"])}),
    }


def own_way(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model.head(model.body(batch[0])), batch[1])


def contrastive(model: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    return nn.functional.cross_entropy(out @ out.T, torch.arange(len(out)))


def refused(pool: Pool) -> dict[str, str]:
    """What is said of what cannot be done."""
    each = {"hl+": {"parallel": "shards"}, "mehl+": {"parallel": "data"}}
    calls: dict[str, Any] = {
        "own way": lambda: cook(pool, task_of(loss=own_way), "hl+", parallel="shards"),
        "contrastive": lambda: cook(pool, task_of(loss=contrastive), "hl+", parallel="shards"),
        "three of four": lambda: cook(pool, task_of(), "hl+", parallel="shards", shards=3),
        "not all alike": lambda: compare(pool, task_of(), list(each), each=each),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except StockpotError as error:
            found[name] = str(error)
    methods = ["uniform", "hl+"]
    found |= compare(pool, task_of(), methods, preset="authors", each={"uniform": {"parallel": "shards"}}).failed
    return found


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / f'meet{size}'}", rank=rank, world_size=size)
    found: dict[str, Any] = {name: run(folder, name, parallel="shards") for name in names}
    found["refused"] = refused(Pool.open(folder / "float64"))
    torch.save(found, folder / f"rank_{rank}_of_{size}.pt")
    dist.destroy_process_group()


def fork(size: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=main, args=(rank, size, folder, names)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    fork(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(RUNS))
