"""Pre-trains on the prices of diamonds of the best cut, then turns to the other cuts in 24 ways. A CPU will do.

python experiments/regression/train.py
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from model import DATA, Network, build, read, squared
from safetensors.torch import save_file
from torch import Tensor

TRIALS, TRAINED_ON = 24, 3000  # of 8,389 diamonds; the search takes shares of these


def trial(number: int) -> dict[str, Any]:
    """The random search: rate, weight decay, epochs, share of the data and noise, drawn by the trial's number."""
    draw = np.random.default_rng((11, number))

    def log(low: float, high: float) -> float:
        return float(math.exp(draw.uniform(math.log(low), math.log(high))))

    return {
        "lr": log(2e-4, 4e-3),
        "weight_decay": log(1e-4, 0.3),
        "epochs": float(draw.uniform(5, 30)),
        "share": float(draw.uniform(0.4, 1.0)),
        "noise": float(draw.choice((0.0, 0.02, 0.05))),  # on the numbers, in units of their spread
        "seed": int(draw.integers(2**31)),
    }


def train(
    model: Network, data: tuple[Tensor, Tensor], *, epochs: float, lr: float, weight_decay: float, seed: int,
    noise: float = 0.0, batch: int = 128,
) -> None:  # fmt: skip
    """AdamW with a cosine from `lr` to zero after a short rise."""
    x, y = data
    stream = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    steps = max(1, round(epochs * len(x) / batch))
    for step in range(steps):
        rise = min(1.0, (step + 1) / max(1.0, 0.05 * steps))
        optimizer.param_groups[0]["lr"] = lr * rise * (1 + math.cos(math.pi * step / steps)) / 2
        rows = torch.randint(len(x), (batch,), generator=stream)
        inputs = x[rows] + noise * torch.randn(batch, x.shape[1], generator=stream)
        loss = squared(model, (inputs, y[rows])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--epochs", type=float, default=30, help="of pre-training")
    chosen = parser.parse_args(given)
    torch.manual_seed(0)
    model = build()
    train(model, read("ideal"), epochs=chosen.epochs, lr=2e-3, weight_decay=0.01, seed=0, batch=256)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(start, DATA / "pretrained.safetensors")
    x, y = (values[:TRAINED_ON] for values in read("train"))
    (DATA / "pool").mkdir(exist_ok=True)
    for number in range(chosen.trials):
        values, began = trial(number), time.perf_counter()
        model.load_state_dict(start)
        own = torch.randperm(len(x), generator=torch.Generator().manual_seed(values["seed"]))
        own = own[: round(values["share"] * len(x))]
        train(model, (x[own], y[own]), **{key: value for key, value in values.items() if key != "share"})
        save_file(model.state_dict(), DATA / "pool" / f"trial_{number:03}.safetensors")
        seconds = time.perf_counter() - began
        record = {"trial": values, "seconds": seconds}
        (DATA / "pool" / f"trial_{number:03}.json").write_text(json.dumps(record))
        print(f"trial {number}: rate {values['lr']:.2g}, {values['epochs']:.1f} epochs, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
