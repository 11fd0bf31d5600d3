"""Run by a test, once per rank: the same cooking on every worker, a share of each batch each."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stockpot import Pool, Task, __version__, cook
from stockpot.engine import memory
from stockpot.errors import RunError
from stockpot.run import job
from zoo import MARK, marked_loss, mlp, normed, samples

RUNS: dict[str, dict[str, Any]] = {
    "mehl+": {"method": "mehl+", "block_size": 2},
    "mehl+ for longer": {"method": "mehl+", "block_size": 2, "steps": 8},
    "learned": {"method": "learned"},
    "crossfit by data": {"method": "crossfit", "block_size": 2, "folds": 2, "parallel": "data"},
    "crossfit by folds": {"method": "crossfit", "block_size": 2, "folds": 3, "parallel": "folds"},
    "hl+ by folds": {"method": "hl+", "folds": 3, "parallel": "folds"},
    "batch normalisation": {"method": "mehl+", "block_size": 2},  # a batch that may not be cut
    "as the authors do it": {"method": "mehl+", "block_size": 2, "preset": "authors"},
    "low-memory mode": {"method": "mehl", "low_memory": True},
    "unequal memory": {"method": "mehl+", "block_size": "fit"},  # rank 0 decides for both
    "accumulated": {"method": "mehl", "accumulate": 3},
    "one sample per batch": {"method": "mehl", "batch_size": 1},  # a worker without any
    "bad numbers": {"method": "mehl", "steps": 80, "batch_size": 4},  # in the share of one worker
}


def run(folder: Path, name: str) -> dict[str, object]:
    build = normed if name == "batch normalisation" else mlp
    pool = Pool.open(folder / build.__name__)
    x, y = samples(dtype=torch.float64)
    if name == "bad numbers":
        x[-1, 0] = MARK
    task = Task(build().double(), (x, y), loss=marked_loss if name == "bad numbers" else None)
    settings: dict[str, Any] = {"steps": 5, "batch_size": 15, "lr": 0.05, **RUNS[name]}
    result = cook(pool, task, **settings)
    assert result.soup is not None
    learned = [h for h in result.history if h["kind"] in ("step", "held_out")]
    losses = [h["loss"] for h in learned]
    order = [[h["block"], h["fold"], h["step"]] for h in learned]
    skipped = [h["step"] for h in result.history if h["kind"] == "skipped"]
    return {
        "W": result.soup.W.tolist(),
        "losses": losses,
        "order": order,
        "skipped": skipped,
        "beta": result.soup.about.get("beta"),
    }


def refused(rank: int, folder: Path) -> dict[str, str]:
    """What is said where this rank is about to do something else than rank 0."""

    def cooked(pool: str = "mlp", data: int = 0, **settings: Any) -> None:
        where, samples_of = folder / pool, samples(seed=data, dtype=torch.float64)
        cook(Pool.open(where), Task(mlp().double(), samples_of), "hl+", steps=2, **settings)

    other = folder / "other"
    if rank:  # a file of the same size, with another number in it
        shutil.copytree(folder / "mlp", other)
        file = other / "model_2.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    calls: dict[str, Any] = {
        "settings": lambda: cooked(lr=0.1 + rank),
        "data": lambda: cooked(data=rank),
        "ingredient": lambda: cooked("other" if rank else "mlp"),
        "version": lambda: cooked(),
    }
    said = {}
    for name, call in calls.items():
        vars(job)["__version__"] = "0.0" if rank and name == "version" else __version__
        try:
            call()
        except RunError as error:
            said[name] = str(error)
    vars(job)["__version__"] = __version__
    return said


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    memory.host_memory = lambda: 1 if rank else 2**40  # what one rank alone would cut into single models
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    sent: list[int] = []  # numbers per exchange
    exchange = dist.all_reduce

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return exchange(tensor, *arguments, **options)

    dist.all_reduce = counted
    told: list[str] = []  # exchanges of what is no tensor

    def counting(name: str) -> None:
        function = getattr(dist, name)

        def called(*arguments: Any, **options: Any) -> Any:
            told.append(name)
            return function(*arguments, **options)

        setattr(dist, name, called)

    for name in ("all_gather_object", "broadcast_object_list", "all_gather", "reduce_scatter_tensor", "broadcast"):
        counting(name)
    found: dict[str, Any] = {}
    for name in RUNS:
        sent.clear()
        told.clear()
        found[name] = {**run(folder, name), "sent": list(sent), "told": list(told)}
    found["refused"] = refused(rank, folder)
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
