"""Several labels per sample: binary cross-entropy, micro F1."""

import torch
from fine_tunes import fine_tunes

torch.manual_seed(0)
x = torch.randn(900, 12)
labels = (x @ torch.randn(12, 5) + torch.randn(900, 5) > 1.5).long()  # (n, 5) of 0 and 1
train, fit, report = [(x[rows], labels[rows]) for rows in torch.arange(900).split(300)]
model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))

# Your part
from stockpot import Pool, Task, cook


def loss(model, batch):  # -> (n,), one loss per sample
    x, labels = batch
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    return cross_entropy(model(x), labels.float(), reduction="none").mean(dim=1)


pool = Pool.open(fine_tunes("multi-label", model, train, loss))  # yours: Pool.open("checkpoints")
task = Task(model, fit, report, loss=loss, metric="micro_f1")  # a logit above 0 says yes
result = cook(pool, task)
print(result)
