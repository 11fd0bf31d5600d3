"""How often 95 % intervals hold the truth, in simulated draws: means, ratios, F1, AUC, and means over groups.

    python benchmarks/interval_coverage.py [--draws 2000] [--sizes 50 500]

The truth is the value on a million samples of the same kind.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from stockpot.task import METRICS, Scores
from stockpot.task.metric import Metric

Draw = Callable[[int, torch.Generator], Tensor]


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def right_or_wrong(n: int, generator: torch.Generator) -> Tensor:
    return (torch.rand(n, 1, generator=generator) < 0.8).double()


def skewed(n: int, generator: torch.Generator) -> Tensor:
    return -_normal(n, 1, generator=generator).mul(0.5).exp()


def tokens(n: int, generator: torch.Generator) -> Tensor:
    """Summed loss and length of sequences of 10 to 200 tokens; short ones have the higher loss per token."""
    length = (10 + 190 * torch.rand(n, generator=generator, dtype=torch.float64)).round()
    each = 2 + 20 / length + 0.3 * _normal(n, generator=generator)
    return torch.stack([each * length, length], dim=1)


def classes(n: int, generator: torch.Generator) -> Tensor:
    label = torch.randint(3, (n,), generator=generator)
    other = torch.randint(3, (n,), generator=generator)
    return torch.stack([torch.where(torch.rand(n, generator=generator) < 0.7, label, other), label], dim=1).double()


def entities(n: int, generator: torch.Generator) -> Tensor:
    true = torch.poisson(torch.full((n,), 2.0), generator=generator)
    right = torch.binomial(true, torch.full((n,), 0.8), generator=generator)
    return torch.stack([right, right + torch.poisson(torch.full((n,), 0.4), generator=generator), true], 1).double()


def ranked(n: int, generator: torch.Generator) -> Tensor:
    label = (torch.rand(n, generator=generator) < 0.4).double()
    return torch.stack([label * 1.2 + _normal(n, generator=generator), label], dim=1)


CASES: dict[str, tuple[Metric, Draw]] = {
    "mean, right or wrong": (METRICS["accuracy"], right_or_wrong),
    "mean, skewed": (METRICS["negative_mse"], skewed),
    "ratio (nats_per_token)": (METRICS["nats_per_token"], tokens),
    "exp of ratio (perplexity)": (METRICS["perplexity"], tokens),
    "macro_f1": (METRICS["macro_f1"], classes),
    "entity_f1": (METRICS["entity_f1"], entities),
    "roc_auc": (METRICS["roc_auc"], ranked),
}


def coverage(name: str, n: int, draws: int, seed: int = 0) -> float:
    """The share of draws whose interval holds the truth."""
    metric, draw = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    truth = Scores(draw(1_000_000, generator), metric).value
    held = 0
    for _ in range(draws):
        low, high = Scores(draw(n, generator), metric).interval()
        held += low <= truth <= high
    return held / draws


def grouped(groups: int, draws: int, seed: int = 0) -> float:
    """The same for a mean over samples of groups of 1 to 20, which share half of their variance."""
    generator = torch.Generator().manual_seed(seed)
    held = 0
    for _ in range(draws):
        units = torch.arange(groups).repeat_interleave(torch.randint(1, 21, (groups,), generator=generator))
        shared, own = _normal(groups, generator=generator)[units], _normal(len(units), generator=generator)
        low, high = Scores((shared + own)[:, None], METRICS["negative_mse"], units=units).interval()
        held += low <= 0 <= high
    return held / draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 500])
    given = parser.parse_args()
    error = 100 * math.sqrt(0.95 * 0.05 / given.draws)
    print(f"{given.draws} draws, standard error {error:.1f} points")
    for name in CASES:
        print(
            f"{name:28}", *(f"n = {n}: {100 * coverage(name, n, given.draws):5.1f} %" for n in given.sizes), flush=True
        )
    print(f"{'mean over groups':28}", *(f"{g} groups: {100 * grouped(g, given.draws):5.1f} %" for g in (20, 50)))


if __name__ == "__main__":
    main()
