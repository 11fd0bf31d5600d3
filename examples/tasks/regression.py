"""Regression: squared error, R2. The data is real: scikit-learn's diabetes patients (needs scikit-learn)."""

import torch
from fine_tunes import fine_tunes
from sklearn.datasets import load_diabetes

torch.manual_seed(0)
x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
x, y = x / x.std(0), (y - y.mean()) / y.std()
train, fit, report = [(x[rows], y[rows]) for rows in torch.randperm(len(x)).split([142, 150, 150])]
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

# Your part
from stockpot import Pool, Task, cook


def loss(model, batch):  # -> (n,), one loss per sample
    x, y = batch
    return (model(x).squeeze(1) - y).square()


pool = Pool.open(fine_tunes("regression", model, train, loss))  # yours: Pool.open("checkpoints")
task = Task(model, fit, report, loss=loss, metric="r2")  # float targets; outputs (n,) or (n, 1)
result = cook(pool, task)
print(result)
