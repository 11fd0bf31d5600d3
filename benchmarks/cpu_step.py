"""On a CPU: the inner step of a small transformer with b = 8 against its plain forward + backward.

    python benchmarks/cpu_step.py

Ours and autograd through all models give the same coefficient gradient before anything is timed. The two are timed
in turn, many times, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import machine
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import stockpot
from stockpot.engine import Batch, Engine, Live, Options
from stockpot.layout import Layout
from stockpot.soups.mehl import State, mehl_soup


class Classifier(nn.Module):
    """A text classifier of 3.3M parameters."""

    def __init__(self, words: int = 2000, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(dim=1))


def autograd_through_all(pool: stockpot.Pool, layout: Layout, tokens: Tensor, labels: Tensor) -> Tensor:
    """The coefficients' gradient the classic way: one graph from W through all models to the loss. (K, G)"""
    alpha = torch.zeros(len(pool), len(layout), requires_grad=True)
    W = 1 / len(pool) + alpha - alpha.mean(dim=0)
    mixed = {
        name: torch.tensordot(W[:, j], torch.stack([pool.tensor(k, name) for k in range(len(pool))]), dims=1)
        for name, j in layout.group_of.items()
    }
    outputs = torch.func.functional_call(Classifier().eval(), mixed, (tokens,))
    return torch.autograd.grad(nn.functional.cross_entropy(outputs, labels), alpha)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu_step.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    b = 8
    base = Classifier()
    tokens, labels = torch.randint(0, 2000, (64, 48)), torch.randint(0, 4, (64,))
    with tempfile.TemporaryDirectory() as folder:
        for k in range(b):
            state = {n: p.detach() + 0.01 * torch.randn_like(p) for n, p in base.state_dict().items()}
            save_file(state, Path(folder) / f"m{k}.safetensors")
        pool = stockpot.Pool.open(folder)
        task = stockpot.Task(Classifier(), (tokens, labels))
        indices = torch.arange(args.batch)
        layout = Layout.of(pool, "tensor")
        wanted = autograd_through_all(pool, layout, tokens[indices], labels[indices])
        plain_model = Classifier().eval()
        batch = (tokens[: args.batch], labels[: args.batch])

        def plain() -> None:
            plain_model.zero_grad()
            nn.functional.cross_entropy(plain_model(batch[0]), batch[1]).backward()

        with Live(task, pool, layout) as live, task.learning():
            engine = Engine(live, Options(batch_size=args.batch), task.fit, block_size=b)
            directions = engine.load(range(b))
            start = torch.zeros(b, len(layout))
            engine.mix(engine.theta_fix(start, range(b)), start)
            _, slope, _ = engine.gradient(directions, Batch([batch], args.batch), None)
            error = float((slope - slope.mean(dim=0) - wanted).norm() / wanted.norm())
            assert error < 1e-4, error
            algorithm = mehl_soup(
                engine, [range(b)], task.fit, lambda _: indices, J=10_000, eta=0.01, state=State(start)
            )

            def ours() -> None:
                next(algorithm)

            times: dict[str, list[float]] = {"plain": [], "ours": []}
            for _ in range(args.repeat):
                for name, step in (("plain", plain), ("ours", ours)):
                    began = time.perf_counter()
                    step()
                    times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(t[3:]) for name, t in times.items()}
    result = {
        "what": __doc__.splitlines()[0],
        "machine": machine.describe(),
        "parameters": sum(p.numel() for p in base.parameters()),
        "batch": args.batch,
        "b": b,
        "gradient_relative_error": error,
        "ms": {name: round(1000 * m, 2) for name, m in medians.items()},
        "ratio": round(medians["ours"] / medians["plain"], 3),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
