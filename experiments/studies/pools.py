"""Small pools for trying learners on a CPU: each is pre-trained and fine-tuned in seconds, and drawn anew by a seed.

Data, base model, fine-tunes and the split are functions of the seed alone. Nothing here is a result of stockpot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from stockpot import Pool, Task
from stockpot.task import Data
from stockpot.task.data import generator

Pair = tuple[Tensor, Tensor]
Parts = Mapping[str, Pair]  # pretrain, train, fit, dev
SIZES = {"train": 300, "dev": 4000}
SAMPLES = 5700  # of data that is made up; more than anything fits on
SYMBOLS, LENGTH = 24, 24  # of the made-up language


@dataclass(frozen=True)
class Small:
    """A pool and the task on it. Those that are `kept_apart` no rule of the default was tried on."""

    name: str
    what: str
    models: int
    fitted: int
    parts: Callable[[int, int], Parts]  # (seed, samples to fit on)
    build: Callable[[int], nn.Module]  # number of outputs
    outputs: tuple[int, int]  # of the base model and of the fine-tunes
    kept_apart: bool = False
    shares: str = ""  # the pool of this name, with other samples to fit on
    epochs: float = 15.0
    rates: tuple[float, float] = (1e-3, 1.2e-2)

    def make(self, folder: Path, seed: int) -> None:
        """The pool's files, where they are not there yet."""
        if (folder / f"model_{self.models - 1:02}.safetensors").is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        parts = self.parts(seed, self.fitted)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            base = self.build(self.outputs[0])
            train(base, parts["pretrain"], lr=4e-3, epochs=12, decay=0.01, seed=seed)
            start = base.state_dict()
            for k in range(self.models):
                draw = np.random.default_rng((seed, k))
                model = self.build(self.outputs[1])
                model.load_state_dict(
                    {
                        name: start[name] if start[name].shape == value.shape else torch.zeros_like(value)
                        for name, value in model.state_dict().items()
                    }
                )
                x, y = parts["train"]
                own = torch.from_numpy(draw.permutation(len(x))[: round(draw.uniform(0.4, 1.0) * len(x))])
                low, high = map(math.log, self.rates)
                rate = math.exp(draw.uniform(low, high))
                epochs = self.epochs * float(draw.uniform(0.4, 1.6))
                train(model, (x[own], y[own]), lr=rate, epochs=epochs, decay=float(draw.uniform(0, 0.3)), seed=k)
                save_file(
                    {name: value.detach().contiguous() for name, value in model.state_dict().items()},
                    folder / f"model_{k:02}.safetensors",
                )

    def opened(self, folder: Path, seed: int, fitted: int | None = None) -> tuple[Pool, Task, Data]:
        """Pool, task and what its soups are judged on."""
        self.make(folder, seed)
        parts = self.parts(seed, fitted or self.fitted)
        loss: dict[str, Any] = {} if self.outputs[1] > 1 and not self.says else {"loss": loss_of, "metric": "loss"}
        task = Task(self.build(self.outputs[1]), parts["fit"], batch_size=2000, device="cpu", **loss)
        return Pool.open(folder), task, Data.of(parts["dev"])

    @property
    def says(self) -> bool:
        """Whether it is a language model."""
        return self.parts is language


def loss_of(model: nn.Module, batch: Pair) -> Tensor:
    """The loss of each sample, (n,): of classes, numbers, or symbols one after the other."""
    out: Tensor = model(batch[0])
    if out.shape[-1] == 1:
        squares: Tensor = (out[..., 0] - batch[1]).square()
        return squares
    if out.ndim == 3:
        losses = functional.cross_entropy(out.flatten(0, 1), batch[1].flatten(), reduction="none")
        return losses.view(batch[1].shape).mean(1)
    return functional.cross_entropy(out, batch[1], reduction="none")


def train(model: nn.Module, data: Pair, *, lr: float, epochs: float, decay: float, seed: int, size: int = 32) -> None:
    """AdamW with a cosine down to zero."""
    (x, y), stream = data, torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)
    steps = max(1, round(epochs * len(x) / size))
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
        rows = torch.randint(len(x), (size,), generator=stream)
        optimiser.zero_grad()
        loss_of(model, (x[rows], y[rows])).mean().backward()  # type: ignore[no-untyped-call]
        optimiser.step()


# Data ---------------------------------------------------------------------------------------------------


def _parts(x: Tensor, y: Tensor, coarse: Tensor, seed: int, fitted: int, spare: int = 400) -> Parts:
    """Parts that share no sample, but for the base model's: it learns labels of another kind, of `train` and `spare`.

    Had it seen the samples to fit on, they would be easier than any other, and say nothing of those.
    """
    order = torch.randperm(len(x), generator=generator("bench", seed))
    before, rest = order[: SIZES["train"] + spare], order[SIZES["train"] + spare :]
    rows = {"train": order[: SIZES["train"]], "fit": rest[:fitted]}
    rows["dev"] = rest[-min(SIZES["dev"], len(rest) - max(fitted, 400)) :]
    return {"pretrain": (x[before], coarse[before]), **{name: (x[some], y[some]) for name, some in rows.items()}}


def digits(seed: int, fitted: int) -> Parts:
    """Scikit-learn's digits; before, clusters of similar images are told apart."""
    from sklearn.datasets import load_digits

    from stockpot.zoo.demo import cluster

    found = load_digits()
    x = torch.from_numpy(found.data).float() / 8 - 1
    return _parts(x, torch.from_numpy(found.target).long(), cluster(x, 20, seed), seed, fitted, spare=100)


def mixture(seed: int, fitted: int, noise: float = 1.6, features: int = 20) -> Parts:
    """Eight classes of three clumps each; before, the clumps are told apart."""
    stream = generator("mixture", seed)
    centres = torch.randn(24, features, generator=stream)
    clump = torch.randint(24, (SAMPLES,), generator=stream)
    x = centres[clump] + noise * torch.randn(len(clump), features, generator=stream)
    return _parts(x, clump % 8, clump, seed, fitted)


def surface(seed: int, fitted: int) -> Parts:
    """Friedman's first function with noise; before, another of its kind."""
    stream = generator("surface", seed)
    x = torch.rand(SAMPLES, 10, generator=stream)

    def friedman(turned: Tensor) -> Tensor:
        a, b, c, d, e = turned.T[:5]
        found: Tensor = (10 * torch.sin(math.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e - 14.4) / 5
        return found

    y = friedman(x) + 0.2 * torch.randn(len(x), generator=stream)
    return _parts(x, y, friedman(x.flip(1).roll(1, 1)) / 2 + y / 2, seed, fitted)


def teacher(seed: int, fitted: int) -> Parts:
    """Six classes as a random network tells them apart, one in ten wrong; before, another on the same features."""
    stream = generator("teacher", seed)
    first, second, third = (torch.randn(size, generator=stream) for size in ((16, 24), (24, 6), (24, 12)))
    x = torch.randn(SAMPLES, 16, generator=stream)
    hidden = torch.relu(x @ first)
    wrong = torch.rand(SAMPLES, generator=stream) < 0.1
    y = torch.where(wrong, torch.randint(6, (SAMPLES,), generator=stream), (hidden @ second).argmax(1))
    return _parts(x, y, (hidden @ third).argmax(1), seed, fitted)


def language(seed: int, fitted: int) -> Parts:
    """Made-up languages, in which a symbol depends on the two before it; before, a mixture of several."""
    stream = generator("language", seed)
    shared = 1.2 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=stream)
    own = [1.2 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=stream) for _ in range(3)]

    def written(count: int, accents: list[Tensor]) -> Pair:
        tables = torch.stack([(shared + accent).softmax(-1) for accent in accents])
        which = torch.randint(len(accents), (count,), generator=stream)
        text = torch.randint(SYMBOLS, (count, 2), generator=stream)
        for _ in range(LENGTH - 1):
            chances = tables[which, text[:, -2], text[:, -1]]
            text = torch.cat([text, torch.multinomial(chances, 1, generator=stream)], 1)
        return text[:, :-1], text[:, 1:]

    # The same texts for every number of fitting samples, so that fewer of them are some of them.
    found = {"pretrain": written(1500, own[1:]), "train": written(600, own[:1]), "dev": written(2000, own[:1])}
    x, y = written(max(fitted, 1000), own[:1])
    return {**found, "fit": (x[:fitted], y[:fitted])}


def coins(seed: int, fitted: int) -> Parts:
    """Two classes that have nothing to do with the inputs: whatever is learned is right half of the time."""
    stream = generator("coins", seed)
    x = torch.randn(SAMPLES, 16, generator=stream)
    y, before = (torch.randint(classes, (SAMPLES,), generator=stream) for classes in (2, 12))
    return _parts(x, y, before, seed, fitted)


# Models -------------------------------------------------------------------------------------------------


def network(features: int, width: int, depth: int) -> Callable[[int], nn.Module]:
    """Layers that are normalised and added to what came in."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            changed: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
            return changed

    def build(outputs: int) -> nn.Module:
        layers = [Layer() for _ in range(depth)]
        return nn.Sequential(nn.Linear(features, width), *layers, nn.LayerNorm(width), nn.Linear(width, outputs))

    return build


def convolutions(outputs: int) -> nn.Module:
    """Two convolutions on images of 8 x 8."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, outputs),
    )  # fmt: skip


class Speaker(nn.Module):
    """A recurrent network, or one that sees the last three symbols."""

    def __init__(self, outputs: int, recurrent: bool) -> None:
        super().__init__()
        self.known = nn.Embedding(SYMBOLS, 24)
        self.recurrent = nn.GRU(24, 48, batch_first=True) if recurrent else None
        self.up, self.head = nn.Linear(48 if recurrent else 72, 96), nn.Linear(96, outputs)

    def forward(self, text: Tensor) -> Tensor:
        x = self.known(text)
        if self.recurrent is not None:
            x = self.recurrent(x)[0]
        else:
            x = torch.cat([functional.pad(x, (0, 0, back, 0))[:, : x.shape[1]] for back in range(3)], -1)
        found: Tensor = self.head(functional.gelu(self.up(x)))
        return found


POOLS = {
    small.name: small
    for small in (
        Small("digits", "a network of 2 layers, digits", 16, 400, digits, network(64, 48, 2), (20, 10)),
        Small("few-digits", "the same with 100 samples to fit", 16, 100, digits, network(64, 48, 2), (20, 10),
              shares="digits"),
        Small("images", "convolutions, digits", 12, 400, digits, convolutions, (20, 10)),
        Small("uneven", "the digits' network, rates up to those that ruin it", 16, 400, digits, network(64, 48, 2),
              (20, 10), rates=(1e-3, 1e-1)),
        Small("mixture", "a network, 8 classes of clumps", 24, 1000, mixture, network(20, 48, 2), (24, 8)),
        Small("few-mixture", "the same with 100 samples", 24, 100, mixture, network(20, 48, 2), (24, 8),
              shares="mixture"),
        Small("surface", "a network, Friedman's function", 16, 800, surface, network(10, 48, 2), (1, 1)),
        Small("language", "the last three symbols, a made-up language", 12, 500, language,
              lambda outputs: Speaker(outputs, False), (SYMBOLS, SYMBOLS)),
        Small("apart-teacher", "a wide network, labels of a random network, K = 40", 40, 150, teacher,
              network(16, 64, 1), (12, 6), kept_apart=True),
        Small("apart-recurrent", "a recurrent network, K = 6", 6, 200, language,
              lambda outputs: Speaker(outputs, True), (SYMBOLS, SYMBOLS), kept_apart=True, rates=(2e-3, 2e-2)),
        Small("apart-deep", "a network of 5 layers, more noise, K = 32", 32, 600,
              lambda seed, fitted: mixture(seed + 500, fitted, 2.2, 32), network(32, 32, 5), (24, 8), kept_apart=True),
        Small("apart-surface", "a wide and shallow network, Friedman's function, K = 8", 8, 250, surface,
              network(10, 96, 1), (1, 1), kept_apart=True),
    )
}  # fmt: skip


def with_samples(name: str, fitted: int) -> Small:
    """The same pool, with so many samples to fit on."""
    return replace(POOLS[name], name=f"{name}-{fitted}", fitted=fitted, shares=name)


class Demo:
    """The pool of `stockpot demo`."""

    shares = ""

    def opened(self, folder: Path, seed: int) -> tuple[Pool, Task, Data]:
        from stockpot.zoo.demo import DigitViT, digits, make_demo_pool

        make_demo_pool(folder, seed=seed)
        task = Task(DigitViT(), digits("fit", seed), device="cpu")
        return Pool.open(folder / "pool"), task, Data.of(digits("report", seed))


COINS = Small("coins", "a network, labels by chance", 8, 100, coins, network(16, 32, 1), (12, 2))
# For experiments/bars.py alone.
OTHERS: dict[str, Small | Demo] = {
    "demo": Demo(),
    **{
        small.name: small
        for small in (
            *(with_samples(name, fitted) for name in ("digits", "mixture") for fitted in (100, 300, 1000)),
            *(with_samples(name, 100) for name in ("images", "surface", "language")),
            COINS,
            replace(COINS, name="coins-400", fitted=400, shares="coins"),
        )
    },
}
