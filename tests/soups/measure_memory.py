"""Run by a test in a process of its own: peak anonymous memory while learning on K models."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import torch
from torch import nn

from stockpot import Pool, Task, cook
from stockpot.soups.result import PeakMemory, anonymous_bytes

WIDTH = 512  # 32 layers of 512 x 512: 8.4M parameters, 34 MB


def build() -> nn.Module:
    """Small tensors: a few of them are in flight while models are averaged and built, and whether that instant is seen
    depends on how long it lasts, which does depend on K."""
    layers: list[nn.Module] = []
    for _ in range(32):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, WIDTH, generator=generator), torch.arange(4)
    pool = Pool.open(folder)
    task = Task(build(), (x, y))
    pool.facts()  # reads with several threads; what their allocators keep is not what learning takes
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous_bytes()
    with PeakMemory(torch.device("cpu"), interval=0.001) as peak:
        cook(pool, task, "mehl", block_size=4, blocks=4, steps=1, batch_size=4)
    sys.stdout.write(json.dumps({"models": len(pool), "before": before, "peak": peak.host}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
