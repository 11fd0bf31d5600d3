"""A dual encoder (pictures and captions, questions and answers): in-batch loss, recall@1 over the whole set."""

import torch
from fine_tunes import fine_tunes


class DualEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.picture = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        self.caption = torch.nn.Sequential(torch.nn.Linear(15, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))

    def forward(self, picture, caption):
        encoded = self.picture(picture), self.caption(caption)
        return tuple(torch.nn.functional.normalize(part, dim=1) for part in encoded)


torch.manual_seed(0)
meaning = torch.randn(700, 6)
picture = meaning @ torch.randn(6, 20) + 0.7 * torch.randn(700, 20)
caption = meaning @ torch.randn(6, 15) + 0.7 * torch.randn(700, 15)
parts = torch.arange(700).split([300, 200, 200])
train, fit, report = [{"picture": picture[rows], "caption": caption[rows]} for rows in parts]
model = DualEncoder()

# Your part
from stockpot import Pool, Task, cook
from stockpot.task import Metric


def loss(model, batch):  # -> a scalar: it compares the samples of a batch with each other
    a, b = model(**batch)
    target = torch.arange(len(a), device=a.device)
    return torch.nn.functional.cross_entropy(10 * a @ b.T, target)


def recall(table):  # (N, 2D) of the whole set -> how often the right partner is the nearest of all N
    a, b = table.chunk(2, dim=1)
    near = a @ b.T
    return float((near.diagonal() >= near.amax(dim=1)).double().mean())


recall_at_1 = Metric("recall@1", lambda outputs, _: torch.cat(outputs, dim=1), recall)
pool = Pool.open(fine_tunes("contrastive", model, train, loss))  # yours: Pool.open("checkpoints")
task = Task(model, fit, report, loss=loss, metric=recall_at_1, batch_size=64)  # the loss belongs to one batch size
result = cook(pool, task)
print(result)
