"""A language model of the shape of Llama, 31.5M parameters, its two pools, and the data they are judged on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stockpot import Pool, Task

DATA = Path(__file__).parents[1] / "data" / "lm-llama"
METRIC, UNIT = "nats per token", "text"  # lower is better on the page; intervals take a speech, a review as the unit
SECOND = "held_reviews"
START = "pretrained.safetensors"  # the model before fine-tuning
FITTED = 2000  # sequences that a seed draws from `fit`
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}


def build(vocabulary: int = 4096, length: int = 128, *, compiled: bool = False, **sizes: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary, max_position_embeddings=length, tie_word_embeddings=False, use_cache=False,
        **{**SIZES, **sizes},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if compiled:  # each layer for itself: all share one piece of code
        torch._dynamo.config.recompile_limit = 64  # learning and scoring, batches of several sizes
        for layer in model.model.layers:
            layer.compile()
    return model


def read(part: str) -> Tensor:
    """Token numbers (n, 128)."""
    return torch.from_numpy(np.load(DATA / "tokens" / f"{part}.npz")["x"].astype(np.int64))


def units(part: str) -> np.ndarray:
    """Which text each sequence begins in, (n,)."""
    return np.load(DATA / "tokens" / f"{part}.npz")["text"]


def batch(tokens: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens, "labels": tokens}


def task(seed: int, reports: Iterable[str], *, compiled: bool = False, **sizes: int) -> Task:
    """What is fitted on is another draw for every seed; folds and intervals keep a speech together."""
    fit = read("fit")
    drawn = torch.randperm(len(fit), generator=torch.Generator().manual_seed(seed))[:FITTED]
    gpu = torch.cuda.is_available()
    parts = [*dict.fromkeys(reports)]
    return Task(
        build(compiled=compiled, **sizes), batch(fit[drawn]), {part: batch(read(part)) for part in parts},
        groups=units("fit")[drawn.numpy()], report_groups={part: units(part) for part in parts},
        metric="nats_per_token", device="cuda" if gpu else "cpu", autocast=torch.bfloat16 if gpu else None,
        batch_size=256,
    )  # fmt: skip


def pool() -> Pool:
    return Pool.open(DATA / "pool")


def adapters() -> Pool:
    return Pool.open(DATA / "adapters", base=DATA / "base")


def others(pool: str, device: torch.device) -> Iterable[tuple[str, dict[str, Tensor], float]]:
    """PEFT's own averages of the adapters: each way's name, the full model's tensors, seconds."""
    if pool != "adapters":
        return ()
    from training import averages  # beside tasks.py, which calls this

    folders = sorted(path.parent for path in (DATA / "adapters").glob("*/adapter_config.json"))
    return averages(folders, lambda: LlamaForCausalLM.from_pretrained(DATA / "base").to(device))
