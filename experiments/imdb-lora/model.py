"""MiniLM-L6 with LoRA adapters, and the reviews they are judged on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import BertForSequenceClassification

from stockpot import Pool, Task

DATA = Path(__file__).parents[1] / "data" / "imdb-lora"
METRIC, UNIT = "accuracy in %", None
SECOND = None
START = "base/model.safetensors"  # the model before fine-tuning
FITTED = 2900  # reviews that a seed draws from `fit`, as many as imdb-minilm has


def read(part: str) -> tuple[Tensor, Tensor]:
    """Token numbers (n, 128), padded with zeros, and classes (n,)."""
    found = np.load(DATA / "tokens" / f"{part}.npz")
    return torch.from_numpy(found["x"].astype(np.int64)), torch.from_numpy(found["y"].astype(np.int64))


def batch(reviews: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"input_ids": reviews[0], "attention_mask": (reviews[0] != 0).long(), "labels": reviews[1]}


def load(folder: Path = DATA / "base") -> BertForSequenceClassification:
    """Without dropout: adapters are small, and runs repeat."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **still)


def task(seed: int, reports: Iterable[str]) -> Task:
    """What is fitted on is another draw for every seed."""
    x, y = read("fit")
    drawn = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:FITTED]
    gpu = torch.cuda.is_available()
    return Task(
        load(DATA / "base"), batch((x[drawn], y[drawn])), {part: batch(read(part)) for part in reports},
        metric="accuracy", device="cuda" if gpu else "cpu", autocast=torch.bfloat16 if gpu else None, batch_size=1024,
    )  # fmt: skip


def pool() -> Pool:
    return Pool.open(DATA / "adapters", base=DATA / "base")


def others(pool: str, device: torch.device) -> Iterable[tuple[str, dict[str, Tensor], float]]:  # noqa: ARG001
    """PEFT's own averages of the adapters: each way's name, the full model's tensors, seconds."""
    from training import averages  # beside tasks.py, which calls this

    folders = sorted(path.parent for path in (DATA / "adapters").glob("*/adapter_config.json"))
    return averages(folders, lambda: load(DATA / "base").to(device))
