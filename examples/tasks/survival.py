"""Survival with censoring: Weibull log-likelihood, concordance over all pairs of patients."""

import torch
from fine_tunes import fine_tunes

torch.manual_seed(0)
x = torch.randn(600, 8)
risk = (x @ torch.randn(8, 1)).squeeze(1)
death, end = -torch.rand(600).log() * (-risk).exp(), 3 * torch.rand(600)  # studied until `end`
time, seen = torch.minimum(death, end), death <= end
columns = {"input": x, "time": time, "seen": seen}
train, fit, report = [{k: v[rows] for k, v in columns.items()} for rows in torch.arange(600).split(200)]
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

# Your part
from stockpot import Pool, Task, cook
from stockpot.task import Metric


def loss(model, batch):  # -> (n,): minus the log-likelihood of dying at `time`, or of living longer
    log_rate = model(batch["input"]).squeeze(1)
    return batch["time"] * log_rate.exp() - batch["seen"] * log_rate


def concordance(table):  # (N, 3) of all patients -> how often the one who died first had the higher rate
    rate, time, seen = table.T
    first = (time[:, None] < time) & (seen[:, None] == 1)
    return float((rate[:, None] > rate)[first].double().mean())


def statistics(rate, batch):  # -> (n, 3), what is kept of each patient
    return torch.stack([rate.squeeze(1), batch["time"], batch["seen"]], dim=1)


pool = Pool.open(fine_tunes("survival", model, train, loss))  # yours: Pool.open("checkpoints")
task = Task(model, fit, report, loss=loss, metric=Metric("concordance", statistics, concordance))
result = cook(pool, task)
print(result)
