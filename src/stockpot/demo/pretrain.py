"""Pre-training without labels: the model learns to tell clusters of similar images apart.

The clusters are those of k-means on pixels. Images are shifted at random while the model looks at them, so it has
to learn shapes where k-means saw pixels; no label of any image is used, and no image of the report split.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stockpot.demo.vit import DigitViT
from stockpot.events import Event, Listener, ignore
from stockpot.finetune import Augmentation, Plan, Trial
from stockpot.finetune.training import train
from stockpot.task import Data, Task
from stockpot.task.data import generator

CLUSTERS = 30
ROUNDS = 20
EPOCHS = 20.0
RATE = 4e-3
BATCH = 64


def pretrain(images: Tensor, *, seed: int = 0, listen: Listener = ignore) -> DigitViT:
    """A digit classifier whose encoder is trained and whose head is blank."""
    labels = cluster(images, CLUSTERS, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitViT(classes=CLUSTERS)
        blank = DigitViT()
    trial = Trial(lr=RATE, weight_decay=0.05, epochs=EPOCHS, augmentation=1.0, seed=seed)
    plan = Plan((trial,), batch_size=BATCH, augmentation=Augmentation(erase=False, jitter=False))
    data = Data.of((images, labels), name="pre-training data")

    def on_epoch(done: int, total: int, loss: float) -> None:
        listen(Event("epoch", {"trial": "pretraining", "epoch": done, "epochs": total, "loss": loss}))

    model.train()
    train(Task(model, data), data, trial, plan, parameters=model.parameters(), on_epoch=on_epoch)
    encoder = {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}
    blank.load_state_dict(encoder, strict=False)
    nn.init.zeros_(blank.head.weight)
    nn.init.zeros_(blank.head.bias)
    return blank


def cluster(images: Tensor, count: int, seed: int) -> Tensor:
    """Lloyd's k-means: which of `count` clusters each image is in. (n,)"""
    points = images.flatten(1).double()  # (n, d)
    centres = points[torch.randperm(len(points), generator=generator("clusters", seed))[:count]]
    nearest = torch.cdist(points, centres).argmin(1)
    for _ in range(ROUNDS):
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)  # sums of whole numbers: exact
        sizes = torch.bincount(nearest, minlength=count).unsqueeze(1)
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
        nearest = torch.cdist(points, centres).argmin(1)
    return nearest
