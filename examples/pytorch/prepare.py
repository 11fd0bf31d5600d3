"""Makes what the example needs: noisy signals, and a model trained on cleaner ones from an earlier project."""

from pathlib import Path

import numpy as np
import torch
from model import build
from torch import nn

HERE = Path(__file__).parent
SHAPES = (
    np.sin,
    lambda t: np.sign(np.sin(t)),  # square
    lambda t: 2 * (t / (2 * np.pi) % 1) - 1,  # sawtooth
    lambda t: 2 * np.abs(2 * (t / (2 * np.pi) % 1) - 1) - 1,  # triangle
    lambda t: np.sin(t) ** 3,  # pulses
)


def signals(n: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.integers(0, len(SHAPES), n)
    time = np.linspace(0, 1, 64)
    x = np.empty((n, 64), dtype=np.float32)
    for i, kind in enumerate(y):
        angle = 2 * np.pi * (random.uniform(2, 4) * time + random.uniform())
        x[i] = random.uniform(0.5, 1.5) * SHAPES[kind](angle) + noise * random.standard_normal(64)
    return x, y


def main() -> None:
    x, y = signals(3000, noise=0.5, seed=0)
    np.savez(HERE / "signals.npz", x=x, y=y)
    torch.manual_seed(0)
    model = build()
    early_x, early_y = (torch.from_numpy(part) for part in signals(1000, noise=0.2, seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        for rows in torch.randperm(len(early_x)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(early_x[rows]), early_y[rows]).backward()
            optimizer.step()
    torch.save(model.state_dict(), HERE / "base.pt")
    print("wrote signals.npz and base.pt")


if __name__ == "__main__":
    main()
