"""What learning would need and take on several GPUs, computed from pieces that were measured on one.

Nobody here could run this on many GPUs. The table below says where each piece comes from; what is no measurement but
the maker's figure or a guess is said too. docs/scaling.md has the model in words, and its check.

    compute     3 x the FLOPs of a forward pass, of this rank's part of a batch, at RATE; eager launches set a floor
    directions  projecting and mixing read b directions of this rank's part of the model, at BANDWIDTH
    FSDP2       each block's parameters twice and its gradients once; beside the compute at best, after it at worst
    exchange    b x G coefficients' gradients and two sums, once around
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from stockpot.engine.plan import LARGE, NAMES, Need, parts, room
from stockpot.soups.arrangement import BUSY
from stockpot.soups.forecast import Size

RESERVED = 0.1  # of the memory, for activations and logits, which only a trial pass could tell


@dataclass(frozen=True)
class Pieces:
    """What a device does in a second, and where that was measured."""

    rate: float = 471e12  # FLOP/s: forward + backward of 6.74B in bf16, 352 ms (benchmarks/results/llm_step_7b.json)
    launch: float = (
        0.39e-3  # s per tensor: eager steps of 0.3B, 50 ms, bound by the host (benchmarks/results/llm_step.json)
    )
    bandwidth: float = 3.5e12  # B/s of `project` and `mix`, the slower one (benchmarks/results/kernels.json)
    inside: float = 450e9  # B/s between GPUs of a host: NVLink, the maker's figure, not measured
    between: float = 50e9  # B/s of a GPU to other hosts: 400 Gbit/s, the maker's figure, not measured
    latency: float = 20e-6  # s of one hop of a small exchange: a guess, not measured
    per_host: int = 8  # GPUs


@dataclass(frozen=True)
class Work:
    """What is learned, as far as arithmetic is concerned."""

    parameters: int  # P, mixed ones
    width: int  # bytes of a parameter in the model
    models: int  # K
    block: int  # b, loaded at a time
    groups: int  # G
    tensors: int
    largest: int  # parameters of the largest block that FSDP2 gathers at once
    folds: int  # 1: none
    batch: int  # samples of a step
    forward: float | None  # FLOPs of a forward pass of one sample; None: not known


@dataclass(frozen=True)
class Scaled:
    """One arrangement of `ranks`. Bytes and seconds are of one rank and one step."""

    ranks: int
    way: str  # data, folds or shards
    together: int  # ranks that hold the model together; 1: each holds it alone
    directions: str
    memory: Mapping[str, int]
    fits: bool
    coefficients: int  # bytes of b x G + 2 numbers
    fsdp: int  # bytes of parameters and gradients that FSDP2 exchanges
    ddp: int  # bytes that data parallelism of the model's gradients would send instead
    seconds: tuple[float, float] | None  # of a step: everything overlapped, and nothing

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def work_of(
    size: Size,
    *,
    width: int,
    block: int,
    groups: int,
    folds: int,
    batch: int,
    names: Mapping[str, int],
    forward: float | None,
) -> Work:
    """`names`: tensor -> numbers in it. Tensors of one repeated block have the same name up to its first number."""
    blocks: dict[str, int] = {}
    for name, numel in names.items():
        words = name.split(".")
        first = next((i for i, word in enumerate(words) if word.isdigit()), -1)
        blocks[".".join(words[: first + 1])] = blocks.get(".".join(words[: first + 1]), 0) + numel
    return Work(
        size.parameters, width, size.models, min(block, size.models), groups, len(names), max(blocks.values()), folds,
        batch, forward,
    )  # fmt: skip


def arranged(work: Work, ranks: int, memory: int, pieces: Pieces | None = None) -> Scaled:
    """The arrangement that gives up least: whole models, then rounder directions, then as few ranks together as fit."""
    pieces = pieces or Pieces()
    dtypes = [torch.bfloat16, torch.int8] if work.width < 8 else [torch.float64]
    last: Scaled | None = None
    for together in (n for n in range(1, ranks + 1) if ranks % n == 0):
        for dtype in dtypes:
            held = _memory(work, together, dtype)
            last = _scaled(
                work, ranks, together, dtype, held, sum(held.values()) <= (1 - RESERVED) * room(memory), pieces
            )
            if last.fits:
                return last
    assert last is not None
    return last


def _memory(work: Work, together: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of one rank; activations, logits and data are not among them, for only a trial run could tell."""
    need = Need(
        models=work.models, parameters=work.parameters, model_width=work.width, held_models=1, batch=1, step=0,
        sample=0.0, soup_width=work.width,
    )  # fmt: skip
    single = work.parameters >= LARGE
    whole = parts(need, work.block, dtype, 1, False, single)
    del whole["step"], whole["data"]
    # The mean waits on the host. FSDP2 holds the block that runs and the next one whole, and one block's gradients.
    gathered = 3 * work.largest * work.width if together > 1 else 0
    return {**{name: -(-size // together) for name, size in whole.items()}, "gathered": gathered}


def _scaled(
    work: Work, ranks: int, together: int, dtype: torch.dtype, held: Mapping[str, int], fits: bool, pieces: Pieces
) -> Scaled:
    turns = -(-work.folds // ranks)
    alone = together == 1 and work.folds > 1 and work.folds >= BUSY * ranks * turns
    way = "shards" if together > 1 else "folds" if alone else "data"
    coefficients = 0 if alone or ranks == 1 else 4 * (work.block * work.groups + 2)
    model = work.parameters * work.width
    fsdp = 3 * model * (together - 1) // together
    ddp = 0 if ranks == 1 else 2 * model * (ranks - 1) // ranks
    out = Scaled(ranks, way, together, NAMES[dtype], held, fits, coefficients, fsdp, ddp, None)
    if work.forward is None:
        return out
    samples = work.batch if alone or ranks == 1 else math.ceil(work.batch / ranks)
    compute = max(3 * work.forward * samples / pieces.rate, work.tensors * pieces.launch if ranks > 1 else 0.0)
    # Project reads the directions and the gradient; mix reads them and theta_fix, and writes the model.
    one = work.block * work.parameters * dtype.itemsize
    directions = (2 * one + 3 * model) / together / pieces.bandwidth
    hops = 2 * math.ceil(math.log2(ranks))
    line = pieces.inside if ranks <= pieces.per_host else pieces.between
    exchange = hops * (pieces.latency + coefficients / line) if coefficients else 0.0
    gather = fsdp / (pieces.inside if together <= pieces.per_host else pieces.between)
    best = max(compute, gather) + directions + exchange
    return replace(out, seconds=(best, compute + gather + directions + exchange))
