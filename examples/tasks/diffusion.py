"""Noise prediction as in diffusion models: the noise is fixed by the sample, so every model meets the same."""

import torch
from fine_tunes import fine_tunes


class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.SiLU(), torch.nn.Linear(64, 2))

    def forward(self, noisy, level):
        return self.body(torch.cat([noisy, level], dim=1))


torch.manual_seed(0)
angle = 2 * torch.pi * torch.rand(400)
x = torch.stack([angle.cos(), angle.sin()], dim=1) * (1 + 0.1 * torch.randn(400, 1))  # a ring
x_train, x_fit, x_report = x.split([200, 100, 100])
model = Denoiser()

# Your part
from stockpot import Pool, Task, cook


def with_draws(x, draws=4):  # each sample several times; its number says which noise it gets
    return {"clean": x.repeat_interleave(draws, 0), "number": torch.arange(len(x) * draws)}


def loss(model, batch):  # -> (n,); the same numbers in any batch, in any order, on any device
    seeds = [torch.Generator().manual_seed(number) for number in batch["number"].tolist()]
    drawn = torch.stack([torch.randn(3, generator=seed) for seed in seeds]).to(batch["clean"])
    noise, level = drawn[:, :2], drawn[:, 2:].sigmoid()
    noisy = (1 - level).sqrt() * batch["clean"] + level.sqrt() * noise
    return (model(noisy, level) - noise).square().mean(dim=1)


pool = Pool.open(fine_tunes("diffusion", model, with_draws(x_train), loss))  # yours: Pool.open("checkpoints")
task = Task(model, with_draws(x_fit), with_draws(x_report), loss=loss, metric="loss")
result = cook(pool, task)
print(result)
