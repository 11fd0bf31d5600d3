"""Pre-trains the language model on reviews, then turns it to speeches in 24 ways, and in 32 ways with LoRA adapters.

python experiments/lm-llama/train.py pretrain               # on one GPU
python experiments/lm-llama/train.py finetune
python experiments/lm-llama/train.py adapters
python experiments/lm-llama/train.py pretrain --steps 20 --batch 8 --small    # a trial on a CPU
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model import DATA, batch, build, read
from safetensors.torch import load_file, save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import training

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TRIALS, ADAPTERS = 24, 32
RANKS = (2, 4, 8, 16)


def trial(number: int) -> dict[str, Any]:
    return training.drawn(number, stream=7, rates=(1e-4, 2e-3))


def adapter_trial(number: int) -> dict[str, Any]:
    """Adapters take higher rates; ranks take turns."""
    return {**training.drawn(number, stream=8, rates=(5e-4, 8e-3)), "rank": RANKS[number % len(RANKS)]}


def pretrain(
    out: Path, *, epochs: float, size: int, steps: int | None, small: bool, device: torch.device, compiled: bool = False
) -> None:
    torch.manual_seed(0)
    trainer = training.Trainer(build(compiled=compiled, **(SMALL if small else {})), size, device)
    tokens = read("reviews")
    steps = steps or round(epochs * len(tokens) / size)
    trainer.train(batch(tokens), steps=steps, lr=1.5e-3, weight_decay=0.1, seed=0, say=training.say)
    save_file({name: value.cpu() for name, value in trainer.model.state_dict().items()}, out)


def finetune(
    start: Path,
    out: Path,
    *,
    trials: int,
    size: int,
    small: bool,
    device: torch.device,
    epochs: float = 1.0,
    compiled: bool = False,
) -> None:
    """`epochs` multiplies those of every trial."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = training.Trainer(build(compiled=compiled, **(SMALL if small else {})), size, device)
    weights, data = load_file(start), batch(read("train"))
    for number in range(trials):
        trainer.model.load_state_dict(weights)
        record = training.turned(trainer, data, number, trial(number), epochs)
        state = {name: value.detach().cpu().contiguous() for name, value in trainer.model.state_dict().items()}
        save_file(state, out / f"trial_{number:03}.safetensors")
        (out / f"trial_{number:03}.json").write_text(json.dumps(record))


def adapters(
    start: Path, out: Path, *, trials: int, size: int, small: bool, device: torch.device, epochs: float = 1.0
) -> None:
    """PEFT folders `out/trial_*`, on all linear layers but the last, and the base beside them as `base`."""
    base = out.parent / "base"

    def load() -> nn.Module:
        model = build(**(SMALL if small else {}))
        model.load_state_dict(load_file(start))
        return model

    if not base.is_dir():
        load().save_pretrained(base)
    chosen = ((number, adapter_trial(number)) for number in range(trials))
    how: dict[str, Any] = {"targets": "all-linear", "task": "CAUSAL_LM", "batch": size, "device": device}
    training.adapters(base, out, load, batch(read("train")), chosen, epochs=epochs, **how)


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
        pretrain(start, size=chosen.batch or 128, steps=chosen.steps, compiled=chosen.compiled, **common)
    elif chosen.what == "finetune":
        out, trials = DATA / "pool", chosen.trials or TRIALS
        finetune(start, out, trials=trials, size=chosen.batch or 32, compiled=chosen.compiled, **common)
    else:
        adapters(start, DATA / "adapters", trials=chosen.trials or ADAPTERS, size=chosen.batch or 64, **common)


if __name__ == "__main__":
    main()
