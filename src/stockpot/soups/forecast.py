"""What a method will need before anything is spent: memory and reading, by arithmetic alone.

Memory follows the engine's own plan (`engine/plan.py`): b directions of P mixed parameters, the soup's fixed part, the
mean, the model and its gradients. Not included, because only a trial run could tell: activations and logits of a
forward and backward pass, the data itself, and what PyTorch takes for being loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from stockpot.engine.plan import Need, parts
from stockpot.layout import Layout, mixing_dtype
from stockpot.pool import Pool
from stockpot.soups.registry import METHODS, settings_for
from stockpot.soups.settings import PAPER_BLOCK

NOT_INCLUDED = "activations and logits, the data, and PyTorch itself"


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
    for method in METHODS:
        for block in _blocks(method, size.models):
            memory = (
                METHODS[method].vectors * size.parameters * size.width + size.beside
                if block is None
                else learning_memory(size, block)
            )
            reading = _models_read(method, size.models) * size.ingredient
            out.append(Forecast(method, block, memory, reading, None if budget is None else memory <= budget))
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
    dtype = torch.bfloat16 if rounded else torch.float64 if size.double else torch.float32
    return sum(parts(need, block, dtype, 1, False).values())


def largest_block(size: Size, budget: int) -> int:
    """The largest b that fits; 0 when none does."""
    fitting = [b for b in range(1, size.models + 1) if learning_memory(size, b) <= budget]
    return fitting[-1] if fitting else 0


def _blocks(method: str, models: int) -> Iterable[int | None]:
    if not METHODS[method].learned:
        return [None]
    if not METHODS[method].blockwise:
        return [models]
    return sorted({min(size, models) for size in (1, 4, PAPER_BLOCK, models)})


def _models_read(method: str, models: int) -> int:
    """How many times a checkpoint is read, with the soup built once to be scored and once to be reported."""
    scoring, building = models, 2 * models
    return {
        "best": scoring + 2,
        "uniform": building,
        "greedy": scoring + models + building,
        "ensemble": 2 * models,
        # The mean, the block, the soup; every ingredient is scored, and so are means of half, a quarter, ... per fold.
        "crossfit": 2 * models + building + scoring + models + settings_for(method).folds * models,
    }.get(method, 2 * models + building)
