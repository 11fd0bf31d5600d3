"""A model with a forward of its own, several inputs and a dict as output."""

import torch
from fine_tunes import fine_tunes


class Shop(torch.nn.Module):
    """Will a customer buy? From numbers (n, 4), the ids of what was looked at (n, 6), and which of those are there."""

    def __init__(self):
        super().__init__()
        self.items = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, numbers, *, items, there):
        seen = (self.items(items) * there.unsqueeze(2)).sum(1)
        return {"chance": self.head(torch.cat([numbers, seen], dim=1)).squeeze(1).sigmoid()}


torch.manual_seed(0)
numbers, items, there = torch.randn(900, 4), torch.randint(20, (900, 6)), (torch.rand(900, 6) < 0.6).float()
bought = ((numbers.sum(1) + (torch.randn(20)[items] * there).sum(1) + torch.randn(900)) > 0).float()
columns = {"numbers": numbers, "items": items, "there": there, "bought": bought}
train, fit, report = [{k: v[rows] for k, v in columns.items()} for rows in torch.arange(900).split(300)]
model = Shop()

# Your part
from stockpot import Pool, Task, cook


def loss(model, batch):  # the model is called as it is anywhere else
    chance = model(batch["numbers"], items=batch["items"], there=batch["there"])["chance"]
    return torch.nn.functional.binary_cross_entropy(chance, batch["bought"], reduction="none")


def right(outputs, batch):  # -> (n,), one score per sample; outputs are what forward returns
    return ((outputs["chance"] > 0.5) == batch["bought"].bool()).float()


pool = Pool.open(fine_tunes("several-inputs", model, train, loss))  # yours: Pool.open("checkpoints")
task = Task(model, fit, report, loss=loss, metric=right)  # forward is given the columns that it names
result = cook(pool, task)
print(result)
