"""Two ranks of one thread against one rank of one thread, by data and by folds; or NCCL with one rank against none.

    python benchmarks/ranks.py                  # on two cores with nothing else to do
    python benchmarks/ranks.py --world-of-one   # on a GPU: does a process group cost anything, are CUDA graphs kept?

A job that is bound by steps, from `cook` to its result. Both sides give the same soup to rounding before anything is
timed; they are timed in turn, and figures are medians. Processor time of the busier rank stands beside: it depends less
on what else the machine does, and what it cannot see is waiting.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
from cpu_step import Classifier
from safetensors.torch import save_file
from torch import Tensor

import stockpot
from stockpot.events import Event

MODELS = 4
CHECKED = 4  # steps
SHAPE = {"words": 500, "width": 128}
LARGE = {"words": 2000, "width": 768, "layers": 12}  # of the GPU's job: 87M parameters
WAYS: dict[str, dict[str, Any]] = {"data": {"parallel": "data"}, "folds": {"parallel": "folds", "folds": 2}}


def pool_in(folder: Path, shape: dict[str, int]) -> None:
    torch.manual_seed(0)
    base = Classifier(**shape)
    for k in range(MODELS):
        state = {n: p.detach() + 0.01 * torch.randn_like(p) for n, p in base.state_dict().items()}
        save_file(state, folder / f"m{k}.safetensors")


def job(folder: Path, shape: dict[str, int], samples: int, device: str, **settings: Any) -> dict[str, Any]:
    """Cook once: seconds, W and how steps were taken."""
    torch.manual_seed(1)
    data = torch.randint(0, shape["words"], (samples, 48)), torch.randint(0, 4, (samples,))
    task = stockpot.Task(Classifier(**shape).to(device), data, autocast=torch.bfloat16 if device == "cuda" else None)
    pool, path, reached = stockpot.Pool.open(folder), [], []

    def listen(event: Event) -> None:
        if event.kind == "engine":
            path.append(event.data["path"])
        elif event.kind == "step":
            reached.append(time.perf_counter())  # those of a burst come together, when all are done

    began, busy = time.perf_counter(), time.process_time()
    result = stockpot.cook(pool, task, "hl+", lr=0.01, listen=listen, **settings)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    assert result.soup is not None
    bursts = [n for n in range(1, len(reached)) if reached[n] - reached[n - 1] > 1e-3]
    each = math.nan
    if len(bursts) > 1:  # after the first, which pays for what is paid once
        each = (reached[bursts[-1]] - reached[bursts[0]]) / (bursts[-1] - bursts[0])
    return {"seconds": seconds, "cpu_seconds": busy, "each": each, "W": result.soup.W.tolist(), "path": path}


def rank(folder: Path, steps: int) -> None:
    """What one of several processes does: every way once, after a short one that pays for what is paid once.

    Soups are compared after the short one: later, rounding has grown where gradients are next to nothing.
    """
    torch.set_num_threads(1)
    found = {}
    for name, how in WAYS.items():
        short = job(folder, SHAPE, 256, "cpu", steps=CHECKED, batch_size=64, **how)
        found[name] = {**job(folder, SHAPE, 256, "cpu", steps=steps, batch_size=64, **how), "W": short["W"]}
    (folder / f"found-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def together(folder: Path, ranks: int, steps: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    several = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **several}
    command = [sys.executable, __file__, "--rank", str(folder), "--steps", str(steps)]
    started = [
        subprocess.Popen(command, env={**environment, "RANK": str(number), "LOCAL_RANK": str(number)})
        for number in range(ranks)
    ]
    codes = [one.wait() for one in started]
    assert codes == [0] * ranks, codes
    each = [json.loads((folder / f"found-{number}.json").read_text()) for number in range(ranks)]
    found: dict[str, Any] = each[0]
    for name, one in found.items():
        one["cpu_seconds"] = max(other[name]["cpu_seconds"] for other in each)
    return found


def apart(one: list[Any], other: list[Any]) -> float:
    return float((Tensor(one) - Tensor(other)).abs().max())


def two_ranks(steps: int, repeat: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        pool_in(folder, SHAPE)
        turns = [(together(folder, 1, steps), together(folder, 2, steps)) for _ in range(repeat)]
    out: dict[str, Any] = {}
    for name in WAYS:
        off = apart(*(side[name]["W"] for side in turns[0]))
        assert off < 1e-5, (name, off)
        one, two = ([turn[side][name]["seconds"] for turn in turns] for side in (0, 1))
        cpu_one, cpu_two = ([turn[side][name]["cpu_seconds"] for turn in turns] for side in (0, 1))
        out[name] = {
            "one_rank_s": [round(s, 2) for s in one],
            "two_ranks_s": [round(s, 2) for s in two],
            "times_faster": round(statistics.median(one) / statistics.median(two), 3),
            "one_rank_cpu_s": [round(s, 2) for s in cpu_one],
            "two_ranks_cpu_s": [round(s, 2) for s in cpu_two],  # of the busier rank
            "times_less_cpu": round(statistics.median(cpu_one) / statistics.median(cpu_two), 3),
            f"W_apart_after_{CHECKED}_steps": off,
        }
    return out


def world_of_one(steps: int, repeat: int) -> dict[str, Any]:
    """Seconds of a step within a job, after those that pay for its beginning, in pairs of either order."""
    soups: dict[bool, list[Any]] = {False: [], True: []}
    pairs: list[dict[bool, float]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        pool_in(folder, LARGE)
        for turn in range(-1, repeat):  # the first one pays for libraries
            pair = {}
            for world in (False, True) if turn % 2 else (True, False):
                if world:
                    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
                    dist.all_reduce(torch.zeros(1, device="cuda"))  # from here NCCL and its threads are there
                whole = job(folder, LARGE, 512, "cuda", steps=steps, batch_size=128)
                if world:
                    dist.destroy_process_group()
                assert whole["path"] == ["CUDA graph"], whole["path"]
                soups[world].append(whole["W"])
                pair[world] = whole["each"]
            if turn >= 0:
                pairs.append(pair)
    first, *others = soups[False]
    by_chance = max(apart(first, other) for other in others)  # attention's backward pass adds up in any order
    off = min(apart(first, other) for other in soups[True])
    assert off <= 1e-6 + 3 * by_chance, (off, by_chance)
    ratios = [pair[True] / pair[False] for pair in pairs]
    names = {False: "no world", True: "world of one"}
    return {
        "ms_per_step": {names[world]: [round(1000 * pair[world], 3) for pair in pairs] for world in names},
        "ratios": [round(one, 4) for one in ratios],
        "ratio": round(statistics.mean(ratios), 4),
        "standard_error": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
        "path": "CUDA graph",
        "W_apart": off,
        "W_apart_by_chance": by_chance,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-of-one", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank, args.steps)
        return
    if args.world_of_one:
        name, found = "ranks_world_of_one", world_of_one(args.steps or 200, args.repeat or 10)
    else:
        name, found = "ranks", two_ranks(args.steps or 60, args.repeat or 3)
    result = {"what": __doc__.splitlines()[0], "machine": machine.describe(), **found}
    out = args.out or Path(__file__).parent / "results" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
