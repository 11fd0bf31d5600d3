"""What a method will need before anything is spent, by arithmetic alone: memory and reading; on several GPUs time, too.

Memory follows the engine's own plan (`engine/memory.py`): b directions of P mixed parameters, the soup's fixed part,
the mean, the model and its gradients. Not included, because only a trial run could tell: activations and logits of a
forward and backward pass, the data itself, and what PyTorch takes for being loaded.

Nobody here could run this on many GPUs: time is computed from `Pieces` that were measured on one, or are the maker's
figure or a guess, as is said of each. docs/scaling.md has the model in words, and its check.

    compute     3 x the FLOPs of a forward pass, of this rank's part of a batch, at RATE; eager launches set a floor
    directions  projecting and mixing read b directions of this rank's part of the model, at BANDWIDTH
    FSDP2       each block's parameters twice and its gradients once; beside the compute at best, after it at worst
    exchange    b x G coefficients' gradients and two sums, once around
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from stockpot.engine.memory import LARGE, NAMES, ROUNDED, Need, parts, room
from stockpot.layout import Layout, mixing_dtype
from stockpot.pool import Pool
from stockpot.soups.arrangement import keeps_busy
from stockpot.soups.registry import METHODS, Method
from stockpot.soups.settings import PAPER_BLOCK

NOT_INCLUDED = "activations and logits, the data, and PyTorch itself"
RESERVED = 0.1  # of the memory, for activations and logits, where several GPUs are asked about


@dataclass(frozen=True)
class Forecast:
    method: str
    block: int | None  # models loaded at a time; None: the method reads one after the other
    memory: int  # bytes of the device that does the work
    reading: int  # bytes read from the checkpoints; the system's file cache may serve repeated ones
    fits: bool | None  # within the budget, if one was given


@dataclass(frozen=True)
class Size:
    """The pool, as far as arithmetic is concerned."""

    models: int  # K
    parameters: int  # P, mixed ones
    ingredient: int  # bytes of one checkpoint
    beside: int = 0  # bytes of adapters' factors and of the weights that they change
    double: bool = False  # mixed in fp64
    gpu: bool = False  # directions rounded to bf16; the mean waits on the host

    @classmethod
    def of(cls, pool: Pool, layout: Layout) -> Size:
        """What is mixed; tied tensors are mixed once."""
        first_of = {name: names[0] for names in layout.tied for name in names}
        mixed = [name for name in layout.group_of if first_of.get(name, name) == name]
        adapters, K = pool.adapters, len(pool)
        factored = {name for name in mixed if adapters is not None and adapters.only_factors(name)}
        factors = 0 if adapters is None else sum(adapters.nbytes(k, name) for name in factored for k in range(K))
        return cls(
            models=K,
            # Of a tensor with factors one coefficient for each adapter is learned with, and no delta.
            parameters=sum(pool.specs[name].numel for name in mixed if name not in factored) + K * len(factored),
            ingredient=pool.nbytes if adapters is None else sum(one.file.nbytes for one in adapters.each) // K,
            beside=factors + sum(pool.specs[name].nbytes for name in factored),
            double=any(mixing_dtype(pool.specs[name].dtype) == torch.float64 for name in mixed),
            gpu=torch.cuda.is_available(),
        )

    @property
    def width(self) -> int:
        return 8 if self.double else 4


def forecasts(size: Size, budget: int | None = None) -> list[Forecast]:
    """Every method; those that learn block by block with several block sizes."""
    out = []
    for name, method in METHODS.items():
        reading = method.reads(size.models) * size.ingredient
        for block in _blocks(method, size.models):
            plain = method.vectors * size.parameters * size.width + size.beside
            memory = plain if block is None else learning_memory(size, block)
            out.append(Forecast(name, block, memory, reading, None if budget is None else memory <= budget))
    return out


def learning_memory(size: Size, block: int) -> int:
    """Bytes that learning holds with `block` models loaded."""
    need = Need(
        models=size.models,
        parameters=size.parameters,
        model_width=size.width,
        held_models=1 if size.gpu else 3,
        batch=1,
        step=0,
        sample=0.0,
        kept=size.beside,
    )
    rounded = size.gpu and not size.double and not size.beside  # directions of adapters are not
    dtype = ROUNDED[0] if rounded else torch.float64 if size.double else torch.float32
    return sum(parts(need, block, dtype, 1, False).values())


def largest_block(size: Size, budget: int) -> int:
    """The largest b that fits; 0 when none does."""
    fitting = [b for b in range(1, size.models + 1) if learning_memory(size, b) <= budget]
    return fitting[-1] if fitting else 0


def _blocks(method: Method, models: int) -> Iterable[int | None]:
    if not method.learned:
        return [None]
    if not method.blockwise:
        return [models]
    return sorted({min(size, models) for size in (1, 4, PAPER_BLOCK, models)})


# Several GPUs --------------------------------------------------------------------------------------------


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
    dtypes = ROUNDED if work.width < 8 else [torch.float64]
    limit = (1 - RESERVED) * room(memory)
    for together in (n for n in range(1, ranks + 1) if ranks % n == 0):
        for dtype in dtypes:
            held = _memory(work, together, dtype)
            found = _scaled(work, ranks, together, dtype, held, sum(held.values()) <= limit, pieces or Pieces())
            if found.fits:
                return found
    return found


def _memory(work: Work, together: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of one rank; activations, logits and data are not among them, for only a trial run could tell."""
    need = Need(
        models=work.models, parameters=work.parameters, model_width=work.width, held_models=1, batch=1, step=0,
        sample=0.0, soup_width=work.width,
    )  # fmt: skip
    whole = parts(need, work.block, dtype, 1, False, work.parameters >= LARGE)
    del whole["step"], whole["data"]
    # The mean waits on the host. FSDP2 holds the block that runs and the next one whole, and one block's gradients.
    gathered = 3 * work.largest * work.width if together > 1 else 0
    return {**{name: -(-size // together) for name, size in whole.items()}, "gathered": gathered}


def _scaled(
    work: Work, ranks: int, together: int, dtype: torch.dtype, held: Mapping[str, int], fits: bool, pieces: Pieces
) -> Scaled:
    alone = together == 1 and keeps_busy(work.folds, ranks)
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
