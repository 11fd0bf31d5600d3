"""A folder with a pool in fp64, a recipe, and a way to run its commands under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from zoo import fine_tunes, mlp, write

TOY = """
import os, signal, torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

def data(which):
    generator = torch.Generator().manual_seed(0 if which == "fit" else 1)
    x = torch.randn(83, 6, generator=generator, dtype=torch.float64)
    rule = torch.randn(6, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return x, (x @ rule).argmax(dim=1)

calls = 0

def dies(model, batch):
    global calls
    calls += 1
    if os.environ.get("DIES") == os.environ.get("RANK") and calls == int(os.environ["AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def picky(model, batch):
    if os.environ.get("RANK") == "1" and not model.training and torch.is_grad_enabled():
        raise ValueError("not on this host")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""

RECIPE = """
pool: {path: pool}
model: {python: "toy:model", device: cpu}
data: {python: "toy:data", batch_size: 20}
method:
  {methods: [best, uniform, greedy, hl+, mehl+, learned+, crossfit], steps: 12, batch_size: 21, lr: 0.05,
   block_size: 2, each: {crossfit: {steps: 12, lr: 0.05, batch_size: 21}}}
output: {dir: run}
"""

FINETUNE = """
pool: {path: made}
model: {python: "toy:model", device: cpu}
data: {python: "toy:data", batch_size: 20}
finetune: {dir: made, trials: 3, epochs: 1, probe: false, batch_size: 21}
"""

Torchrun = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    folder = tmp_path_factory.mktemp("ranks")
    write(folder / "pool", [{n: v.double() for n, v in s.items()} for s in fine_tunes(mlp, 5)])
    (folder / "toy.py").write_text(TOY)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "finetune.yaml").write_text(FINETUNE)
    return folder


@pytest.fixture(scope="session")
def torchrun(shared: Path) -> Torchrun:
    """`torchrun -m stockpot ...` with so many ranks, in the shared folder."""

    def call(
        ranks: int, *arguments: str, what: Sequence[str] = ("-m", "stockpot"), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        known = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "SLURM"))}
        return subprocess.run(
            [sys.executable, *launcher, *what, *arguments],
            cwd=shared,
            env={**known, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return call
