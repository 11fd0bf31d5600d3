"""Finding NaN and infinite weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stockpot.errors import PoolError, describe
from stockpot.events import Listener
from stockpot.pool.checkpoint import Checkpoint
from stockpot.pool.files import listed, shown
from stockpot.pool.meter import Meter

_CHUNK = 2**22  # elements; bounds what the slow paths copy


def verify_finite(checkpoints: Sequence[Checkpoint], listen: Listener) -> None:
    problems = nonfinite(checkpoints, listen)
    if problems:
        head = f"{len(problems)} of {len(checkpoints)} checkpoints have weights that are not finite"
        raise PoolError("\n".join((head, *problems.values())))


def nonfinite(checkpoints: Sequence[Checkpoint], listen: Listener) -> dict[int, str]:
    """The places of bad checkpoints, and what is wrong with each."""
    meter = Meter(listen, "finite", sum(checkpoint.nbytes for checkpoint in checkpoints))
    problems: dict[int, str] = {}
    for k, checkpoint in enumerate(checkpoints):
        bad: list[str] = []
        for name, spec in checkpoint.specs.items():
            if (spec.dtype.is_floating_point or spec.dtype.is_complex) and spec.numel:
                tensor = checkpoint.tensor(name)
                if not _finite(tensor):
                    bad.append(f"{name} ({_counts(tensor)})")
            meter.add(spec.nbytes)
        if bad:
            problems[k] = describe(
                shown(checkpoint.path),
                expected="finite weights",
                found=f"others in {len(bad)} of its tensors: {listed(bad)}",
                fix="leave this checkpoint out of the pool (a recipe's `pool.nonfinite: drop` does);"
                " its training diverged or the file is damaged",
            )
    return problems


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    return [flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK)]


def _finite(tensor: Tensor) -> bool:
    """Extremes propagate NaN and show infinities, and need no temporary as large as the tensor."""
    for chunk in _chunks(tensor):
        lowest, highest = torch.aminmax(chunk.float() if chunk.dtype.itemsize == 1 else chunk)
        if not (torch.isfinite(lowest) and torch.isfinite(highest)):
            return False
    return True


def _counts(tensor: Tensor) -> str:
    chunks = [chunk.float() if chunk.dtype.itemsize == 1 else chunk for chunk in _chunks(tensor)]
    nan = sum(int(torch.isnan(chunk).sum()) for chunk in chunks)
    infinite = sum(int(torch.isinf(chunk).sum()) for chunk in chunks)
    parts = [f"{count} {what}" for count, what in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(parts)} of {tensor.numel()}"
