"""Trains many fine-tunes of one model in one process, so that a step is captured as a CUDA graph once.

`Trainer` takes whatever model of transformers gives a loss for a batch of named tensors; `adapters` fine-tunes it with
LoRA, whose adapters PEFT makes and writes, and captures one graph for every rank.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLIP, WARM = 1.0, 0.05
Batch = dict[str, Tensor]


def drawn(number: int, stream: int, rates: tuple[float, float], epochs: tuple[float, float] = (0.5, 2)) -> dict:
    """The random search: rate, weight decay, epochs and share of the data, drawn by the trial's number."""
    draw = np.random.default_rng((stream, number))

    def log(low: float, high: float) -> float:
        return float(math.exp(draw.uniform(math.log(low), math.log(high))))

    return {
        "lr": log(*rates),
        "weight_decay": log(1e-3, 0.3),
        "epochs": float(draw.uniform(*epochs)),
        "share": float(draw.uniform(0.4, 1.0)),
        "seed": int(draw.integers(2**31)),
    }


class Trainer:
    """One model and its optimiser; `train` begins anew with other weights, data and settings."""

    def __init__(self, model: nn.Module, batch: int, device: torch.device) -> None:
        self.model, self.batch, self.device = model.to(device).train(), batch, device
        self.params = [p for p in model.parameters() if p.requires_grad]
        gpu = device.type == "cuda"
        # Tensors: a captured step reads them where they lie.
        self.rate, self.keep = (torch.tensor(0.0, device=device) for _ in range(2))
        self.optimizer = torch.optim.AdamW(
            self.params, lr=self.rate if gpu else 1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=gpu, capturable=gpu
        )
        self.given: Batch = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None

    def train(
        self, data: Batch, *, steps: int, lr: float, weight_decay: float, seed: int, say: Callable[[str], None]
    ) -> None:
        """A cosine from `lr` to zero after a short rise; every sample once before any comes again."""
        data = {name: value.to(self.device) for name, value in data.items()}
        n, stream = len(next(iter(data.values()))), torch.Generator().manual_seed(seed)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        order = torch.cat([torch.randperm(n, generator=stream) for _ in range(1 + steps * self.batch // n)])
        order, began = order.to(self.device), time.perf_counter()
        for step in range(steps):
            now = lr * min(1.0, (step + 1) / max(1, WARM * steps)) * (1 + math.cos(math.pi * step / steps)) / 2
            self.rate.fill_(now)
            self.keep.fill_(1 - now * weight_decay)
            if self.device.type != "cuda":
                self.optimizer.param_groups[0]["lr"] = now
            rows = order[step * self.batch : (step + 1) * self.batch]
            if not self.given:
                self.given = {name: value[rows] for name, value in data.items()}
            for name, value in data.items():
                self.given[name].copy_(value[rows])
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
            loss: Tensor = self.model(**self.given).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, CLIP)
        with torch.no_grad():
            torch._foreach_mul_(self.params, self.keep)
        self.optimizer.step()
        return loss.detach()


def turned(trainer: Trainer, data: Batch, number: int, chosen: dict[str, Any], epochs: float = 1.0) -> dict[str, Any]:
    """Train on the trial's share of the data, for `epochs` times as long as the trial says; its record."""
    began = time.perf_counter()
    stream = torch.Generator().manual_seed(chosen["seed"])
    n = len(next(iter(data.values())))
    rows = torch.randperm(n, generator=stream)[: round(chosen["share"] * n)]
    steps = max(1, round(epochs * chosen["epochs"] * len(rows) / trainer.batch))
    last: list[str] = []
    settings = {key: chosen[key] for key in ("lr", "weight_decay", "seed")}
    trainer.train({name: value[rows] for name, value in data.items()}, steps=steps, **settings, say=last.append)
    seconds = time.perf_counter() - began
    rank = f", rank {chosen['rank']}" if "rank" in chosen else ""
    say(f"trial {number}: rate {chosen['lr']:.2g}{rank}, {last[-1]}, {seconds:.1f} s in all")
    return {"trial": chosen, "steps": steps, "seconds": seconds}


def adapters(
    base: Path,
    out: Path,
    load: Callable[[], nn.Module],
    data: Batch,
    trials: Iterable[tuple[int, dict[str, Any]]],
    *,
    targets: str | list[str],
    task: str | None,
    batch: int,
    device: torch.device,
    epochs: float = 1.0,
) -> None:
    """PEFT folders `out/trial_*` of the trials, each of its own rank, on the model that `load` makes of `base`."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    every = dict(trials)
    for rank in sorted({chosen["rank"] for chosen in every.values()}):
        model: Any = load()
        model.name_or_path = str(base)  # the adapters name it as what they were trained on
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type=task)
        trainer = Trainer(get_peft_model(model, config), batch, device)
        layers = [layer for layer in trainer.model.modules() if isinstance(layer, LoraLayer)]
        for number, chosen in every.items():
            if chosen["rank"] != rank:
                continue
            torch.manual_seed(chosen["seed"])
            for layer in layers:
                layer.reset_lora_parameters("default", init_lora_weights=True)
            record = turned(trainer, data, number, chosen, epochs)
            trainer.model.save_pretrained(out / f"trial_{number:03}")
            (out / f"trial_{number:03}.json").write_text(json.dumps(record))


def averages(folders: list[Path], load: Callable[[], nn.Module]) -> Iterable[tuple[str, dict[str, Tensor], float]]:
    """What PEFT makes of adapters with equal weights: each way's name, the full model's tensors, seconds.

    `linear` asks for adapters of one rank, which these are not; `svd` has the largest rank among them.
    """
    from peft import PeftModel

    names = [folder.name for folder in folders]
    for way in ("cat", "svd"):
        began = time.perf_counter()
        model = PeftModel.from_pretrained(load(), folders[0], adapter_name=names[0])
        for folder, name in zip(folders[1:], names[1:], strict=True):
            model.load_adapter(folder, adapter_name=name)
        model.add_weighted_adapter(names, [1 / len(names)] * len(names), "average", combination_type=way)
        model.set_adapter("average")
        yield f"PEFT {way}", model.merge_and_unload().state_dict(), time.perf_counter() - began


def say(line: str) -> None:
    print(line, flush=True)
