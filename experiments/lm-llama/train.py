"""Pre-trains the language model on reviews, then turns it to speeches in 24 ways, and in 32 ways with LoRA adapters.

    python experiments/lm-llama/train.py pretrain               # on one GPU
    python experiments/lm-llama/train.py finetune
    python experiments/lm-llama/train.py adapters
    python experiments/lm-llama/train.py pretrain --steps 20 --batch 8 --small    # a trial on a CPU

One process trains all of them one after the other, so that the step is captured as a CUDA graph once; adapters of one
rank share one. PEFT makes and writes the adapters.
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
TRIALS, ADAPTERS, CLIP, WARM = 24, 32, 1.0, 0.05
RANKS = (2, 4, 8, 16)


def trial(number: int, stream: int = 7, rates: tuple[float, float] = (1e-4, 2e-3)) -> dict[str, Any]:
    """The random search: rate, weight decay, epochs and share of the data, drawn by the trial's number."""
    draw = np.random.default_rng((stream, number))

    def log(low: float, high: float) -> float:
        return float(math.exp(draw.uniform(math.log(low), math.log(high))))

    return {
        "lr": log(*rates),
        "weight_decay": log(1e-3, 0.3),
        "epochs": float(draw.uniform(0.5, 2)),
        "share": float(draw.uniform(0.4, 1.0)),
        "seed": int(draw.integers(2**31)),
    }


def adapter_trial(number: int) -> dict[str, Any]:
    """The same for adapters, which take higher rates; ranks take turns."""
    return {**trial(number, stream=8, rates=(5e-4, 8e-3)), "rank": RANKS[number % len(RANKS)]}


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


def pretrain(
    out: Path,
    *,
    epochs: float,
    batch: int,
    steps: int | None,
    small: bool,
    device: torch.device,
    compiled: bool = False,
) -> None:
    torch.manual_seed(0)
    trainer = Trainer(build(compiled=compiled, **(SMALL if small else {})), batch, device)
    tokens = read("reviews")
    steps = steps or round(epochs * len(tokens) / batch)
    trainer.train(tokens, steps=steps, lr=1.5e-3, weight_decay=0.1, seed=0, say=_say)
    save_file({name: value.cpu() for name, value in trainer.model.state_dict().items()}, out)


def finetune(
    start: Path,
    out: Path,
    *,
    trials: int,
    batch: int,
    small: bool,
    device: torch.device,
    epochs: float = 1.0,
    compiled: bool = False,
) -> None:
    """`epochs` multiplies those of every trial."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(build(compiled=compiled, **(SMALL if small else {})), batch, device)
    weights, tokens = load_file(start), read("train")
    for number in range(trials):
        chosen = trial(number)
        trainer.model.load_state_dict(weights)
        record = _turned(trainer, tokens, number, chosen, epochs)
        state = {name: value.detach().cpu().contiguous() for name, value in trainer.model.state_dict().items()}
        save_file(state, out / f"trial_{number:03}.safetensors")
        (out / f"trial_{number:03}.json").write_text(json.dumps(record))


def adapters(
    start: Path, out: Path, *, trials: int, batch: int, small: bool, device: torch.device, epochs: float = 1.0
) -> None:
    """PEFT folders `out/trial_*`, on all linear layers but the last, and the base beside them as `base`."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    weights, tokens, base = load_file(start), read("train"), out.parent / "base"
    for rank in RANKS:
        torch.manual_seed(0)
        model: Any = build(**(SMALL if small else {}))
        model.load_state_dict(weights)
        if not base.is_dir():
            model.save_pretrained(base)
        model.name_or_path = str(base)  # the adapters name it as what they were trained on
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = Trainer(get_peft_model(model, config), batch, device)
        layers = [layer for layer in trainer.model.modules() if isinstance(layer, LoraLayer)]
        for number in range(trials):
            chosen = adapter_trial(number)
            if chosen["rank"] != rank:
                continue
            torch.manual_seed(chosen["seed"])
            for layer in layers:
                layer.reset_lora_parameters("default", init_lora_weights=True)
            record = _turned(trainer, tokens, number, chosen, epochs)
            trainer.model.save_pretrained(out / f"trial_{number:03}")
            (out / f"trial_{number:03}.json").write_text(json.dumps(record))


def _turned(trainer: Trainer, tokens: Tensor, number: int, chosen: dict[str, Any], epochs: float) -> dict[str, Any]:
    """Train on the trial's share of the data; its record."""
    began = time.perf_counter()
    stream = torch.Generator().manual_seed(chosen["seed"])
    own = tokens[torch.randperm(len(tokens), generator=stream)[: round(chosen["share"] * len(tokens))]]
    steps = max(1, round(epochs * chosen["epochs"] * len(own) / trainer.batch))
    last: list[str] = []
    settings = {key: chosen[key] for key in ("lr", "weight_decay", "seed")}
    trainer.train(own, steps=steps, **settings, say=last.append)
    seconds = time.perf_counter() - began
    rank = f", rank {chosen['rank']}" if "rank" in chosen else ""
    _say(f"trial {number}: rate {chosen['lr']:.2g}{rank}, {last[-1]}, {seconds:.1f} s in all")
    return {"trial": chosen, "steps": steps, "seconds": seconds}


def _say(line: str) -> None:
    print(line, flush=True)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pretrain", "finetune", "adapters"))
    parser.add_argument("--epochs", type=float, default=1.0, help="of the reviews; or times each trial's own")
    parser.add_argument("--steps", type=int, help="of pre-training, in place of epochs")
    parser.add_argument("--batch", type=int, help="sequences; default: 128 to pre-train, 32 to fine-tune, 64 with LoRA")
    parser.add_argument("--trials", type=int, help=f"default: {TRIALS}, and {ADAPTERS} adapters")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="the layers, but not with LoRA: faster on a GPU")
    chosen = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start, common = DATA / "pretrained.safetensors", {"small": chosen.small, "device": device, "epochs": chosen.epochs}
    if chosen.what == "pretrain":
        pretrain(start, batch=chosen.batch or 128, steps=chosen.steps, compiled=chosen.compiled, **common)
    elif chosen.what == "finetune":
        out, trials = DATA / "pool", chosen.trials or TRIALS
        finetune(start, out, trials=trials, batch=chosen.batch or 32, compiled=chosen.compiled, **common)
    else:
        adapters(start, DATA / "adapters", trials=chosen.trials or ADAPTERS, batch=chosen.batch or 64, **common)


if __name__ == "__main__":
    main()
