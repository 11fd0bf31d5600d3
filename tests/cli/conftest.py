"""A folder as a user would have it: checkpoints, a module with model and data, a recipe."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stockpot.cli.app import app
from zoo import fine_tunes, mlp, write

TOY = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def data(which):
    if which == "train":
        return None
    generator = torch.Generator().manual_seed(0 if which == "fit" else 1)
    x = torch.randn(80, 6, generator=generator)
    rule = torch.randn(6, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return x, (x.double() @ rule).argmax(dim=1)
"""

RECIPE = """
pool: {path: pool}
model: {python: "toy:model"}
data: {python: "toy:data"}
method:
  methods: [best, uniform, greedy, hl+, crossfit]
  steps: 30
  lr: 0.05
  each: {crossfit: {steps: 30, lr: 0.05}}
output: {dir: run}
"""


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


Stockpot = Callable[..., Answer]


@pytest.fixture(scope="session")
def stockpot() -> Stockpot:
    def call(*arguments: object) -> Answer:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return Answer(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    write(folder / "pool", fine_tunes(mlp, 4))
    (folder / "toy.py").write_text(TOY)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def folder(shared: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(shared, tmp_path / "work", ignore=shutil.ignore_patterns("run", "__pycache__"))
    return tmp_path / "work"


@pytest.fixture(scope="session")
def compared(shared: Path, stockpot: Stockpot) -> Answer:
    """`stockpot compare` in the shared folder, once for all tests that only look."""
    return stockpot("compare", shared / "recipe.yaml")


def lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]
