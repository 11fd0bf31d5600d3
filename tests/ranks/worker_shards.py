"""Run by a test: the same cooking by several ranks, in all the ways to share it.

The ranks are forked from one process that has imported everything: FSDP2 brings seconds of imports.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, _dynamo, nn
from torch.distributed import fsdp

from lora_zoo import adapter_pool
from stockpot import Event, Pool, StockpotError, Task, compare, cook
from stockpot.task import shards
from zoo import CLASSES, FEATURES, fine_tunes, samples, write

LOADED = (_dynamo, fsdp)  # before the fork; the second uses the first, and loads it late


class Blocks(nn.Module):
    """Rows that 2 and 4 ranks do not divide, and a block that runs twice."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("offset", torch.full((width,), 0.1))

    def body(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = x + torch.tanh(block(x)) + self.get_buffer("offset")
        out: Tensor = self.norm(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def tokens(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Samples of 0 to 4 tokens."""
    each = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    count = (batch[0][:, 0] * 10).long() % 5
    return (each * count).sum(), count.sum()


RUNS: dict[str, dict[str, Any]] = {
    "hl+ by two and two": {"method": "hl+", "shards": 2},
    "hl+": {"method": "hl+"},
    "mehl+": {"method": "mehl+", "block_size": 2},
    "mehl+ in fp32": {"method": "mehl+", "block_size": 2, "dtype": torch.float32},
    "learned+": {"method": "learned+"},
    "learned+ by two and two": {"method": "learned+", "shards": 2},
    "crossfit": {"method": "crossfit", "folds": 2, "steps": 3},
    "crossfit by two and two": {"method": "crossfit", "folds": 2, "shards": 2},
    "greedy": {"method": "greedy"},
    "adapters": {"method": "mehl+", "block_size": 2, "adapters": True},
    "adapters by two and two": {"method": "crossfit", "folds": 2, "shards": 2, "adapters": True},
    "tokens": {"method": "mehl+", "batch_size": 6, "block_size": 3, "loss": tokens},  # unequal numbers of them
    "one sample per batch": {"method": "mehl", "batch_size": 1, "steps": 3},  # ranks without any
    "two samples per batch": {"method": "hl", "batch_size": 2, "steps": 3, "shards": 2},
    "accumulated": {"method": "hl", "batch_size": 5, "accumulate": 3, "steps": 3},  # unequal numbers of pieces
    "low-memory mode": {"method": "hl", "low_memory": True, "steps": 3},
    "hl+ in folds": {"method": "hl+", "folds": 3},  # which two and four ranks do not divide
    "adapters in folds": {"method": "crossfit", "folds": 3, "steps": 3, "adapters": True},
    "adapters in fp32": {"method": "learned+", "adapters": True, "dtype": torch.float32},
}


def ways(name: str) -> list[str]:
    """How ranks may share it."""
    if "shards" in RUNS[name]:
        return ["shards"]
    return ["data", "shards", *(["folds"] if "folds" in RUNS[name] else [])]


def bound(name: str) -> float:
    """What rounding may change."""
    return 1e-5 if RUNS[name].get("dtype") is torch.float32 else 1e-12


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """How far the weights and scores of two runs are from each other."""
    if found.keys() != wanted.keys() or found["notes"] != wanted["notes"]:
        return float("inf")
    return max(float((found[key] - wanted[key]).abs().max()) for key in wanted if key != "notes")


def write_pools(folder: Path) -> None:
    """Of full models and of adapters, in two precisions."""
    states = fine_tunes(Blocks, 5)
    modules = {"embed": 2, "blocks.0": 2, "blocks.1": 3, "head": 1}
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        write(folder / name, [{n: v.to(dtype) for n, v in s.items()} for s in states])
        dense = {"blocks.2.weight": torch.eye(7, dtype=dtype)}  # as modules_to_save has them
        own = {k: {"dense": {name: value * (k + 1) / 5 for name, value in dense.items()}} for k in range(4)}
        adapter_pool(folder / f"lora_{name}", Blocks, [modules] * 4, dtype, own=own)
    write(folder / "wide", fine_tunes(lambda: Blocks(64), 5, steps=1))


def task_of(dtype: torch.dtype = torch.float64, **more: Any) -> Task:
    data = [samples(83, dtype=dtype), samples(45, seed=1, dtype=dtype)]
    return Task(Blocks().to(dtype), *data, batch_size=10, **more)


def run(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    """The soup and all scores; alone, unless `parallel` is given."""
    chosen = dict(RUNS[name])
    dtype = chosen.pop("dtype", torch.float64)
    loss = {"loss": chosen.pop("loss")} if "loss" in chosen else {}
    lora = folder / f"lora_{str(dtype).removeprefix('torch.')}"
    pool, task = Pool.open(folder / str(dtype).removeprefix("torch.")), task_of(dtype, **loss)
    if chosen.pop("adapters", False):
        pool = Pool.open(lora / "adapters", base=lora / "base.safetensors")
    settings: dict[str, Any] = {"steps": 6, "batch_size": 21, "lr": 0.05, **chosen, **more}
    if more.get("parallel") != "shards":
        settings.pop("shards", None)
    result = cook(pool, task, **settings)
    assert result.soup is not None
    assert result.fit is not None
    assert task.sharded == (more.get("parallel") == "shards")
    return {
        "W": result.soup.W,
        "fit": result.fit.table,
        "loss": torch.tensor(result.fit.loss),
        "notes": result.notes,
        "report": result.reports["report"].table,
        **({} if result.held_out is None else {"held_out": result.held_out.table}),
        **({} if "beta" not in result.soup.about else {"beta": torch.tensor(result.soup.about["beta"])}),
    }


def held(folder: Path, **more: Any) -> int:
    """Bytes of all tensors in this process between two steps of a learner."""
    found: list[int] = []

    def look(event: Event) -> None:
        if event.kind == "step" and not found:
            storages: dict[int, int] = {}
            for each in gc.get_objects():
                plain = issubclass(type(each), Tensor) and not hasattr(each, "to_local")
                if plain and each.layout == torch.strided:  # a library may keep a sparse one
                    storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
            found.append(sum(storages.values()))

    task = Task(Blocks(64), samples(30), batch_size=10)
    cook(Pool.open(folder / "wide"), task, "hl+", steps=2, batch_size=8, listen=look, **more)
    gc.collect()
    return sum(found)


def exchanged(folder: Path) -> list[tuple[str, int]]:
    """What ranks tell each other beyond FSDP2's own, from the first step to the last."""
    found: list[tuple[str, int]] = []
    before = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_object", "broadcast_object_list")}

    def counted(name: str) -> Any:
        def call(value: Any, *arguments: Any, **options: Any) -> Any:
            found.append((name, value.numel() if isinstance(value, Tensor) else 0))
            return before[name](value, *arguments, **options)

        return call

    for name in before:
        setattr(dist, name, counted(name))
    try:
        run(folder, "mehl+", parallel="shards", shards=2)
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
    steps = [i for i, (name, _) in enumerate(found) if name == "all_reduce"]
    return found[steps[0] : steps[-1] + 1]


def unasked(folder: Path) -> dict[str, Any]:
    """A model of which only two devices together hold what learning needs."""
    before, nbytes = shards.memory_of, sum(p.nbytes for p in Blocks().double().parameters())
    shards.memory_of = lambda device: 2 * nbytes
    try:
        pool, task = Pool.open(folder / "float64"), task_of(device="cpu")
        W = cook(pool, task, "hl+", steps=6, batch_size=21, lr=0.05).soup.W  # type: ignore[union-attr]
        try:
            said = str(cook(pool, task_of(device="cpu"), "hl+", parallel="data"))
        except StockpotError as error:
            said = str(error)
    finally:
        shards.memory_of = before
    return {"W": W, "shards": task.shards, "said": said}


def loaded(folder: Path) -> list[float]:
    """Scores of a soup and of an ingredient that were put into a divided model from outside."""
    pool, task = Pool.open(folder / "float64"), task_of()
    soup = cook(pool, task, "uniform", parallel="shards" if dist.is_initialized() else "auto").soup
    assert soup is not None
    task.load({name: pool.tensor(1, name) for name in pool.specs})
    found = [task.score().loss]
    soup.load_into(task.model)
    return [*found, task.score().loss]


def recorded(folder: Path, method: str) -> None:
    """A run with a record, in a folder that says how many ranks made it."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    settings: dict[str, Any] = {"steps": 4, "parallel": "shards" if ranks > 1 else "auto"}
    cook(Pool.open(folder / "float64"), task_of(), method, run=folder / f"{method}_of_{ranks}", **settings)


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
    found: dict[str, Any] = {}
    for each in names:
        way, _, name = each.partition(": ")
        found[each] = run(folder, name, parallel=way)
    if size == 4:
        found |= shards_alone(folder)
    torch.save(found, folder / f"rank_{rank}_of_{size}.pt")
    dist.destroy_process_group()


def shards_alone(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["refused"] = refused(Pool.open(folder / "float64"))
    found["held"] = held(folder, parallel="shards")
    found["exchanged"] = exchanged(folder)
    found["unasked"] = unasked(folder)
    found["loaded"] = loaded(folder)
    for method in ("greedy", "hl"):
        recorded(folder, method)
    return found


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
    fork(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
