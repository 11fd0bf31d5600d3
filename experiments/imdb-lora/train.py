"""Trains MiniLM's head alone, which makes the base, then 32 LoRA adapters on all linear layers but that.

python experiments/imdb-lora/train.py head
python experiments/imdb-lora/train.py adapters
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model import DATA, batch, load, read

sys.path.insert(0, str(Path(__file__).parents[1]))
import training

ADAPTERS, RANKS = 32, (2, 4, 8, 16)
TARGETS = ["query", "key", "value", "dense"]  # of the head, with two rows, PEFT's svd makes no adapter of rank 16


def trial(number: int) -> dict[str, Any]:
    """Ranks take turns."""
    how = training.drawn(number, stream=9, rates=(2e-4, 5e-3), epochs=(0.5, 1.5))
    return {**how, "rank": RANKS[number % len(RANKS)]}


def head(out: Path, *, size: int, steps: int | None, device: torch.device) -> None:
    torch.manual_seed(0)
    model = load(DATA / "model")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    data = batch(read("train"))
    steps = steps or max(1, len(data["labels"]) // size)
    training.Trainer(model, size, device).train(
        data, steps=steps, lr=1e-2, weight_decay=0.0, seed=0, say=training.say
    )  # fmt: skip
    model.cpu().save_pretrained(out)


def adapters(out: Path, *, trials: int, size: int, device: torch.device, epochs: float = 1.0) -> None:
    """PEFT folders `out/trial_*`."""
    base = out.parent / "base"
    chosen = ((number, trial(number)) for number in range(trials))
    how: dict[str, Any] = {"targets": TARGETS, "task": None, "batch": size, "device": device}
    training.adapters(base, out, lambda: load(base), batch(read("train")), chosen, epochs=epochs, **how)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("head", "adapters"))
    parser.add_argument("--epochs", type=float, default=1.0, help="times each trial's own")
    parser.add_argument("--steps", type=int, help="of the head's training; default: one epoch")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--trials", type=int, default=ADAPTERS)
    chosen = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.what == "head":
        head(DATA / "base", size=chosen.batch, steps=chosen.steps, device=device)
    else:
        out = DATA / "adapters"
        adapters(out, trials=chosen.trials, size=chosen.batch, device=device, epochs=chosen.epochs)


if __name__ == "__main__":
    main()
