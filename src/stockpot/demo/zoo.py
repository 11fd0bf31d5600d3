"""The demo's pool: one pre-training, then fine-tunes whose hyperparameters were drawn at random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stockpot.demo.digits import digits
from stockpot.demo.pretrain import pretrain
from stockpot.demo.vit import DigitViT
from stockpot.events import Event, Listener, ignore
from stockpot.finetune import Augmentation, Plan, Probe, TrialRecord, draw_trials, finetune
from stockpot.finetune.space import Space
from stockpot.finetune.weights import load_weights, read_file, weights_of, write_file
from stockpot.task import Task

TRIALS = 12
SPACES: Mapping[str, Space] = {
    "lr": {"min": 2e-3, "max": 8e-3, "scale": "log"},
    "weight_decay": {"min": 1e-4, "max": 0.3, "scale": "log"},
    "epochs": {"min": 8, "max": 20},
    "label_smoothing": [0.0, 0.05, 0.1, 0.2],
    "augmentation": [0.0, 0.2, 0.4, 0.6],
}


@dataclass(frozen=True)
class Zoo:
    """Where the pool is and what it was made from."""

    pool: Path  # folder of the ingredients
    pretrained: Path
    records: tuple[TrialRecord, ...]
    seed: int

    def task(self) -> Task:
        """The task the ingredients were made for: a live model, data to fit on, data for the report."""
        return Task(DigitViT(), digits("fit", self.seed), digits("report", self.seed))


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of the demo are tiny. On a busy machine a second thread makes their work many times slower, not
    faster, and without it the numbers do not depend on how many processors there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_zoo(
    out: str | Path, *, seed: int = 0, trials: int = TRIALS, parallel: int = 1, listen: Listener = ignore
) -> Zoo:
    """Pre-train once and fine-tune `trials` ingredients into `out/pool`; continues where a killed one was.

    The result does not depend on `parallel`, the number of processes; `finetune` says what a script needs for more.
    """
    with one_thread():
        return _make_zoo(Path(out).absolute(), seed, trials, parallel, listen)


def _make_zoo(folder: Path, seed: int, trials: int, parallel: int, listen: Listener) -> Zoo:
    folder.mkdir(parents=True, exist_ok=True)
    pretrained = folder / "pretrained.safetensors"
    model = DigitViT()
    load_weights(model, _pretrained(pretrained, seed, listen))
    plan = Plan(
        draw_trials(trials, seed=seed, spaces=SPACES),
        batch_size=64,
        probe=Probe(epochs=20, lr=1e-2, seed=seed),
        head="head",
        augmentation=Augmentation(),
    )
    train, fit = digits("train", seed), digits("fit", seed)
    records = finetune(model, train, fit, folder / "pool", plan, parallel=parallel, listen=listen)
    return Zoo(folder / "pool", pretrained, tuple(records), seed)


def _pretrained(path: Path, seed: int, listen: Listener) -> dict[str, Tensor]:
    about = {"format": "pt", "seed": str(seed)}
    if path.is_file():
        weights, found = read_file(path)
        if found == about:
            return weights
    listen(Event("pretraining", {"seed": seed}))
    # Without labels, the images that the fitting data consists of may be used here too.
    images = torch.cat([digits("train", seed)[0], digits("fit", seed)[0]])
    weights = weights_of(pretrain(images, seed=seed, listen=listen))
    write_file(path, weights, about)
    return weights
