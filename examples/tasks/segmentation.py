"""Image segmentation: cross-entropy of each pixel (the default loss), mean intersection over union."""

import torch
from fine_tunes import fine_tunes


def pictures(n):
    """Noisy pictures (n, 1, 12, 12) of a bright and a dark square, and the class of each pixel (n, 12, 12)."""
    classes = torch.zeros(n, 12, 12, dtype=torch.long)
    for i in range(n):
        for kind in (1, 2):
            top, left = torch.randint(0, 8, (2,)).tolist()
            classes[i, top : top + 4, left : left + 4] = kind
    return torch.tensor([0.0, 1.0, -1.0])[classes].unsqueeze(1) + 0.7 * torch.randn(n, 1, 12, 12), classes


torch.manual_seed(0)
train, fit, report = pictures(120), pictures(120), pictures(120)
layers = [torch.nn.Conv2d(1, 12, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(12, 3, 3, padding=1)]
model = torch.nn.Sequential(*layers)

# Your part
from stockpot import Pool, Task, cook
from stockpot.task import Metric


def overlaps(logits, batch):  # (n, C, H, W) -> (n, 2C): of each picture, pixels of intersection and union
    found, true = (torch.nn.functional.one_hot(c, 3).flatten(1, 2) for c in (logits.argmax(1), batch[1]))
    return torch.cat([(found & true).sum(1), (found | true).sum(1)], dim=1)


def mean_iou(table):  # (N, 2C) of all pictures -> one number
    both, either = table.sum(0).chunk(2)
    return float((both / either).mean())


pool = Pool.open(fine_tunes("segmentation", model, train))  # yours: Pool.open("checkpoints")
task = Task(model, fit, report, metric=Metric("mean_iou", overlaps, mean_iou))  # labels (n, H, W), -100 for no label
result = cook(pool, task)
print(result)
