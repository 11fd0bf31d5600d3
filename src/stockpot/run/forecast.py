"""What a method will need before anything is spent: memory and reading, by arithmetic alone.

The engine keeps vectors of P mixed parameters in fp32 (fp64 for fp64 pools). Learning with b models loaded and F folds
holds b directions, one soup per fold, the mean, the live weights, their gradient, and one to spare: b + 4 + F.
Not included, because only a trial run could tell: activations of a forward and backward pass, the data itself, and
what PyTorch takes for being loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stockpot.methods.settings import LEARNED, METHODS, PAPER_BLOCK

NOT_INCLUDED = "activations, the data, and PyTorch itself"
_PLAIN = {"best": 3, "uniform": 3, "ensemble": 3, "greedy": 5}  # vectors held


@dataclass(frozen=True)
class Forecast:
    method: str
    block: int | None  # models loaded at a time; None: the method loads one after the other
    memory: int  # bytes
    reading: int  # bytes read from the checkpoints; the system's file cache may serve repeated ones
    fits: bool | None  # within the budget, if one was given


def forecasts(
    *, models: int, parameters: int, ingredient_bytes: int, width: int = 4, budget: int | None = None
) -> list[Forecast]:
    """Every method; those that learn block by block with several block sizes. `width`: bytes of a parameter."""
    out = []
    for method, switches in METHODS.items():
        folds = int(switches.get("folds", 1))
        for block in _blocks(method, models):
            vectors = _PLAIN[method] if block is None else block + 4 + folds
            memory = vectors * parameters * width
            out.append(
                Forecast(
                    method,
                    block,
                    memory,
                    _models_read(method, models, folds) * ingredient_bytes,
                    None if budget is None else memory <= budget,
                )
            )
    return out


def largest_block(*, models: int, parameters: int, budget: int, folds: int, width: int = 4) -> int:
    """The largest b that fits; 0 when none does."""
    vector = max(1, parameters * width)
    return max(0, min(models, budget // vector - 4 - folds))


def _blocks(method: str, models: int) -> Iterable[int | None]:
    if method not in LEARNED:
        return [None]
    if METHODS[method].get("block_size", "auto") is None:
        return [models]
    return sorted({min(size, models) for size in (1, 4, PAPER_BLOCK, models)})


def _models_read(method: str, models: int, folds: int) -> int:
    """How many times a checkpoint is read, with the soup built once to be scored and once to be reported."""
    scoring, building = models, 2 * models
    return {
        "best": scoring + 2,
        "uniform": building,
        "greedy": scoring + models + building,
        "ensemble": 2 * models,
        # The mean, the block, the soup; the guard scores every ingredient and cooks greedy once per fold.
        "crossfit": 2 * models + building + scoring + models + folds * models,
    }.get(method, 2 * models + building)
