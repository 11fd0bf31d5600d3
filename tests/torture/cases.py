"""Small commands that between them write everything stockpot writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from zoo import fine_tunes, mlp, normed, write

CODE = """
import torch
from torch import nn

def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

def data(which):
    generator = torch.Generator().manual_seed({"train": 0, "fit": 1, "report": 2}[which])
    x = torch.randn(96, 6, generator=generator)
    rule = torch.randn(6, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return x, (x.double() @ rule).argmax(dim=1)
"""

RECIPE = """
pool: {{path: {pool}}}
model: {{python: "toy:{model}"}}
data: {{python: "toy:data"}}
method:
  {{steps: 12, lr: 0.05, batch_size: 16, block_size: 2, methods: [best, uniform, greedy, crossfit],
    each: {{crossfit: {{steps: 12, lr: 0.05, block_size: 2}}}}}}
finetune: {{dir: unused, trials: 3, epochs: [3, 4], lr: [0.01, 0.03], probe_epochs: 2, batch_size: 32}}
output: {{dir: unused}}
"""


@dataclass(frozen=True)
class Case:
    """One command line; `{out}` stands for where it writes."""

    name: str
    command: tuple[str, ...]
    parallel: bool = False  # a second process of the same command beside the first one

    @property
    def finetunes(self) -> bool:
        return self.command[0] == "finetune"

    def arguments(self, out: Path) -> list[str]:
        return [part.replace("{out}", str(out)) for part in self.command]


def prepare(folder: Path, seed: int) -> list[Case]:
    """Pools, code and recipes in `folder`, and the commands to torture."""
    (folder / "toy.py").write_text(CODE)
    models: dict[str, Callable[[], nn.Module]] = {"plain": mlp, "normed": normed}
    for model, build in models.items():
        write(folder / f"pool_{model}", fine_tunes(build, 5, seed=seed))
        (folder / f"{model}.yaml").write_text(RECIPE.format(pool=f"pool_{model}", model=model))

    def cooked(name: str, command: str, model: str, *settings: str, options: tuple[str, ...] = ()) -> Case:
        overrides = [part for one in (*settings, f"output.seed={seed}") for part in ("--set", one)]
        return Case(name, (command, str(folder / f"{model}.yaml"), *overrides, "--out", "{out}", *options))

    def tuned(name: str, model: str, *settings: str, parallel: bool = False) -> Case:
        given = ('finetune.dir="{out}"', f"output.seed={seed}", *settings)
        overrides = [part for one in given for part in ("--set", one)]
        return Case(name, ("finetune", str(folder / f"{model}.yaml"), *overrides), parallel)

    return [
        cooked("compare", "compare", "plain", "method.methods=[best, uniform, greedy, mehl+, crossfit]"),
        cooked("compare with BatchNorm", "compare", "normed", "method.methods=[greedy, ensemble, hl+, crossfit]"),
        cooked("compare two", "compare", "plain", "method.methods=[uniform, greedy]"),
        cooked("cook crossfit with BatchNorm", "cook", "normed", "method.name=crossfit"),
        cooked("cook mehl+ in shards", "cook", "plain", "method.name=mehl+", "output.max_shard_size=200"),
        cooked("cook mehl+ like the authors", "cook", "normed", "method.name=mehl+", "method.preset=authors"),
        cooked("cook greedy with BatchNorm", "cook", "normed", "method.name=greedy"),
        cooked("cook learned", "cook", "plain", "method.name=learned", "method.block_size=null"),
        tuned("finetune", "plain"),
        tuned("finetune with BatchNorm", "normed", "finetune.optimizer=sgd"),
        tuned("finetune two at a time", "normed", parallel=True),
    ]  # fmt: skip
