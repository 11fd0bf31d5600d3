"""Pre-trains the small transformer without labels: it tells apart 80 k-means clusters of the images. 70 s on two cores.

python experiments/tiny/pretrain.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import PCA
from torch.nn import functional

HERE = Path(__file__).parent
DATA = HERE.parent / "data" / "tiny"
PARTS = ("train", "fit", "other", "judge")
CLUSTERS, BATCH = 80, 256
MEAN, STD = 0.286, 0.353  # as in the recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--clusters", type=int, default=CLUSTERS)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE.parent / "fashion-vit"))
    from model import build

    torch.manual_seed(0)
    raw = np.concatenate([np.load(args.data / "images" / f"{part}.npz")["x"] for part in PARTS])
    size = min(40, len(raw))
    spread = PCA(size, random_state=0).fit_transform(raw.reshape(len(raw), -1) / 255.0)
    spread /= np.sqrt(spread.std(axis=0)).clip(1e-6)
    clusters = MiniBatchKMeans(args.clusters, random_state=0, n_init=3).fit_predict(spread)
    images = ((torch.from_numpy(raw.copy()).float() / 255 - MEAN) / STD)[:, None]
    labels = torch.from_numpy(clusters).long()
    model = build(args.clusters, width=48, depth=4, heads=4, patch=7, position=0.5)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    batch = min(BATCH, len(images))
    steps = len(images) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=args.epochs * steps, pct_start=0.1)
    began = time.perf_counter()
    for epoch in range(args.epochs):
        order, total = torch.randperm(len(images)), 0.0
        for rows in order[: steps * batch].split(batch):
            shown = images[rows].flip(-1) if torch.rand(()) < 0.5 else images[rows]
            loss = functional.cross_entropy(model(shown), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item()
        print(
            f"epoch {epoch + 1} of {args.epochs}: loss {total / steps:.3f}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    encoder = {name: value for name, value in model.state_dict().items() if not name.startswith("head")}
    save_file(encoder, args.data / "pretrained.safetensors")


if __name__ == "__main__":
    main()
