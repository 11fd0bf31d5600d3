"""Run by a test in a process of its own: peak anonymous memory while learning on K models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from stockpot import Pool, Task, cook
from stockpot.engine.memory import PeakMemory, anonymous_bytes

WIDTH = 2048  # two layers of 2048 x 2048: 8.4M parameters, 34 MB


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, WIDTH, generator=generator), torch.arange(4)
    pool = Pool.open(folder)
    task = Task(build(), (x, y))
    before = anonymous_bytes()
    # As many blocks whatever K is: a peak is seen by looking often, and both must be looked at equally often.
    passes = max(1, 64 // len(pool))
    with PeakMemory(torch.device("cpu"), interval=0.001) as peak:
        cook(pool, task, "mehl", block_size=4, passes=passes, steps=1, batch_size=4)
    sys.stdout.write(json.dumps({"models": len(pool), "before": before, "peak": peak.host}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
