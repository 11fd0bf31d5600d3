"""Pre-trains the language model on reviews, then turns it to speeches in 24 ways.

    python experiments/lm-llama/train.py pretrain               # on one GPU
    python experiments/lm-llama/train.py finetune
    python experiments/lm-llama/train.py pretrain --steps 20 --batch 8 --small    # a trial on a CPU

One process trains all of them one after the other, so that the step is captured as a CUDA graph once.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import DATA, build, read
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TRIALS, CLIP, WARM = 24, 1.0, 0.05


def trial(number: int) -> dict[str, Any]:
    """The random search: rate, weight decay, epochs and share of the data, drawn by the trial's number."""
    draw = np.random.default_rng((7, number))

    def log(low: float, high: float) -> float:
        return float(math.exp(draw.uniform(math.log(low), math.log(high))))

    return {
        "lr": log(1e-4, 2e-3),
        "weight_decay": log(1e-3, 0.3),
        "epochs": float(draw.uniform(0.5, 2)),
        "share": float(draw.uniform(0.4, 1.0)),
        "seed": int(draw.integers(2**31)),
    }


class Trainer:
    """One model and its optimiser; `train` begins anew with other weights, data and settings."""

    def __init__(self, model: nn.Module, batch: int, device: torch.device) -> None:
        self.model, self.batch, self.device = model.to(device).train(), batch, device
        self.params = [*model.parameters()]
        gpu = device.type == "cuda"
        # Tensors: a captured step reads them where they lie.
        self.rate, self.keep = (torch.tensor(0.0, device=device) for _ in range(2))
        self.optimizer = torch.optim.AdamW(
            self.params, lr=self.rate if gpu else 1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=gpu, capturable=gpu
        )
        self.tokens = torch.zeros(batch, 128, dtype=torch.long, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None

    def train(
        self, tokens: Tensor, *, steps: int, lr: float, weight_decay: float, seed: int, say: Callable[[str], None]
    ) -> None:
        """A cosine from `lr` to zero after a short rise; every sequence once before any comes again."""
        tokens, stream = tokens.to(self.device), torch.Generator().manual_seed(seed)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        order = torch.cat(
            [torch.randperm(len(tokens), generator=stream) for _ in range(1 + steps * self.batch // len(tokens))]
        ).to(self.device)
        began = time.perf_counter()
        for step in range(steps):
            now = lr * min(1.0, (step + 1) / max(1, WARM * steps)) * (1 + math.cos(math.pi * step / steps)) / 2
            self.rate.fill_(now)
            self.keep.fill_(1 - now * weight_decay)
            if self.device.type != "cuda":
                self.optimizer.param_groups[0]["lr"] = now
            self.tokens.copy_(tokens[order[step * self.batch : (step + 1) * self.batch]])
            loss = self._step()
            if (step + 1) % max(1, steps // 8) == 0:
                say(f"step {step + 1} of {steps}  loss {loss.item():.4f}  {time.perf_counter() - began:.0f} s")

    def _step(self) -> Tensor:
        if self.device.type != "cuda":
            return self._learn()
        if self._graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            before = [one.detach().clone() for one in self.params]
            with torch.cuda.stream(stream):
                for _ in range(3):  # allocates what a capture must find ready
                    self._learn()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.no_grad():
                torch._foreach_copy_(self.params, before)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                self._loss = self._learn()
        self._graph.replay()
        assert self._loss is not None
        return self._loss

    def _learn(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss: Tensor = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, CLIP)
        with torch.no_grad():
            torch._foreach_mul_(self.params, self.keep)
        self.optimizer.step()
        return loss.detach()


def pretrain(out: Path, *, epochs: float, batch: int, steps: int | None, small: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    trainer = Trainer(build(**(SMALL if small else {})), batch, device)
    tokens = read("reviews")
    steps = steps or round(epochs * len(tokens) / batch)
    trainer.train(tokens, steps=steps, lr=1.5e-3, weight_decay=0.1, seed=0, say=_say)
    save_file({name: value.cpu() for name, value in trainer.model.state_dict().items()}, out)


def finetune(
    start: Path, out: Path, *, trials: int, batch: int, small: bool, device: torch.device, epochs: float = 1.0
) -> None:
    """`epochs` multiplies those of every trial."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(build(**(SMALL if small else {})), batch, device)
    weights, tokens = load_file(start), read("train")
    for number in range(trials):
        chosen, began = trial(number), time.perf_counter()
        trainer.model.load_state_dict(weights)
        stream = torch.Generator().manual_seed(chosen["seed"])
        own = tokens[torch.randperm(len(tokens), generator=stream)[: round(chosen["share"] * len(tokens))]]
        steps = max(1, round(epochs * chosen["epochs"] * len(own) / batch))
        settings = {key: chosen[key] for key in ("lr", "weight_decay", "seed")}
        trainer.train(own, steps=steps, **settings, say=lambda _: None)
        state = {name: value.detach().cpu().contiguous() for name, value in trainer.model.state_dict().items()}
        save_file(state, out / f"trial_{number:03}.safetensors")
        seconds = time.perf_counter() - began
        record = {"trial": chosen, "steps": steps, "seconds": seconds}
        (out / f"trial_{number:03}.json").write_text(json.dumps(record))
        _say(f"trial {number}: {steps} steps, rate {chosen['lr']:.2g}, {seconds:.1f} s")


def _say(line: str) -> None:
    print(line, flush=True)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pretrain", "finetune"))
    parser.add_argument("--epochs", type=float, help="default: 1 of the reviews; 1 times each trial's own")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, help="sequences; default: 128, and 32 to fine-tune")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = DATA / "pretrained.safetensors"
    if chosen.what == "pretrain":
        pretrain(
            start, epochs=chosen.epochs or 1, batch=chosen.batch or 128, steps=chosen.steps, small=chosen.small,
            device=device,
        )  # fmt: skip
    else:
        finetune(
            start, DATA / "pool", trials=chosen.trials, batch=chosen.batch or 32, small=chosen.small, device=device,
            epochs=chosen.epochs or 1.0,
        )  # fmt: skip


if __name__ == "__main__":
    main()
