"""Run by a test on a GPU: cooking without a process group, in a world of one, and by ranks that share the GPU.

    python worker_gpu.py RANK RANKS FOLDER [cpu]

`cpu` tries the file itself where there is no GPU.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ranks.worker_shards import Blocks
from stockpot import Event, Pool, Task, cook
from zoo import samples

RUNS: dict[str, dict[str, Any]] = {
    "hl+": {"method": "hl+"},
    "mehl+": {"method": "mehl+", "block_size": 2},
    "crossfit": {"method": "crossfit", "folds": 2},
    "adapters": {"method": "mehl+", "block_size": 2, "adapters": True},
    "one sample per batch": {"method": "mehl", "batch_size": 1, "steps": 3},
    "in bf16": {"method": "hl+", "dtype": torch.bfloat16},
}


def run(folder: Path, name: str, device: str, parallel: str = "auto") -> dict[str, Any]:
    """W, the mean loss of the soup, and how steps were taken; alone unless there is a process group."""
    chosen, path = dict(RUNS[name]), list[str]()
    dtype = chosen.pop("dtype", torch.float32)
    pool = Pool.open(folder / str(dtype).removeprefix("torch."))
    if chosen.pop("adapters", False):
        pool = Pool.open(folder / "lora" / "adapters", base=folder / "lora" / "base.safetensors")
    task = Task(Blocks().to(dtype), samples(83, dtype=dtype), batch_size=10, device=device)
    if parallel == "shards":
        task.shard()
    torch.manual_seed(0)

    def listen(event: Event) -> None:
        if event.kind == "engine":
            path.append(event.data["path"])

    if dist.is_initialized() and dist.get_world_size() > 1:
        chosen["parallel"] = parallel
    result = cook(pool, task, listen=listen, **{"steps": 6, "batch_size": 21, "lr": 0.05, **chosen})
    assert result.soup is not None
    assert result.fit is not None
    assert task.sharded == (parallel == "shards")
    return {"W": result.soup.W, "loss": result.fit.loss, "path": path}


def main(rank: int, size: int, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if size == 1:
        found["alone"] = {name: run(folder, name, device) for name in RUNS}
    backend = "nccl" if size == 1 and device == "cuda" else "gloo"  # NCCL refuses two ranks on one GPU
    meet, soon = f"file://{folder / f'meet{size}'}", timedelta(seconds=60)
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=size, timeout=soon)
    dist.all_reduce(torch.zeros(1, device=device))  # from here NCCL and its threads are there
    for way in ("data", "shards") if size == 1 else ("data", "folds", "shards"):
        names = [name for name in RUNS if way != "folds" or name == "crossfit"]
        try:
            found[way] = {name: run(folder, name, device, way) for name in names}
        except RuntimeError as error:  # gloo has not every exchange for what lies on a GPU
            if way != "shards" or backend != "gloo":
                raise
            found["cannot shard"] = f"{type(error).__name__}: {error}"
    torch.save(found, folder / f"rank_{rank}_of_{size}.pt")
    if "cannot shard" not in found:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), (sys.argv[4:] or ["cuda"])[0])
