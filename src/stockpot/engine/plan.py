"""The memory plan: how learning fits a device, decided before it starts and said in one line.

What learning holds, in bytes, with P parameters in the model's dtype (w bytes each) and b models loaded:
directions b P (4, 2 or 1), the soup's fixed part 4 P (2 P where checkpoints and model are bf16), the model w P,
gradients 2 w P (the parameters' own, and all of them flat for the projection; nothing where each is projected and
freed as backward makes it), and what a forward and backward pass needs besides: activations, logits and their gradient
in fp32. A trial run measures that on parts of a batch, with gradients freed as they come: they would hide how fast the
rest grows with the batch, because they are at their most when the activations are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from stockpot.engine.flat import TILE

NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
MARGIN = 1.08  # what a forecast may be off without breaking the budget
MOST = 2 * 2**30  # bytes it may be off at most: what is large (directions, weights) is known to the byte
LARGE = 2**28  # parameters; above, a launch for each tensor costs less than a flat copy of its gradient
_PIECES = 4 * 4 * 2**22  # the loader's buffers, a piece and what it may run over


@dataclass(frozen=True)
class Plan:
    """What is loaded at once and how; `parts` are the bytes it is expected to take."""

    block_size: int  # b
    dtype: torch.dtype  # of the directions
    accumulate: int
    low_memory: bool
    streamed: bool  # more than one block
    parts: Mapping[str, int]
    budget: int | None
    reason: str
    one_by_one: bool = False  # each tensor's gradient is projected and freed as backward makes it

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        size = f"{self.total / 2**30:.2f} GiB"
        of = "" if self.budget is None else f" of {self.budget / 2**30:.2f} GiB"
        blocks = "blocks streamed from disk" if self.streamed else "all models resident"
        extra = f", batch in {self.accumulate} pieces" if self.accumulate > 1 else ""
        extra += ", low-memory mode" if self.low_memory else ""
        return f"{self.block_size} models at a time as {NAMES[self.dtype]}, {blocks}{extra}: {size}{of} ({self.reason})"


@dataclass(frozen=True)
class Need:
    """What the model and the task ask for, before any choice."""

    models: int  # K
    parameters: int  # P
    model_width: int  # bytes of a parameter in the model
    held_models: int  # vectors of P in fp32 beside the directions: the fixed part, and what the host holds
    batch: int  # samples of a step
    step: int  # bytes a forward and backward pass takes on top of weights and gradients, whatever its batch
    sample: float  # bytes it takes for each sample
    data: int = 0  # bytes of data kept on the device
    kept: int = 0  # bytes of weights and buffers that are not mixed
    soup_width: int = 4  # bytes of a number in each of the held_models
    spared: tuple[int, float] | None = None  # step and sample in low-memory mode, where they were measured


def parts(
    need: Need, block_size: int, dtype: torch.dtype, accumulate: int, low_memory: bool, one_by_one: bool = False
) -> dict[str, int]:
    P = need.parameters
    width = torch.tensor([], dtype=dtype).element_size()
    step, sample = need.step, need.sample
    if low_memory:
        step, sample = need.spared or (step, sample / 3)
    out = {
        "directions": block_size * P * width,
        "soup": need.held_models * P * need.soup_width,
        "model": P * need.model_width + need.kept,
        "gradients": 0 if low_memory or one_by_one else 2 * P * need.model_width,
        "step": step + int(sample * -(-need.batch // accumulate)),
        "data": need.data,
        "buffers": min(_PIECES, 16 * P),
    }
    if dtype == torch.int8:
        out["directions"] += 4 * block_size * -(-P // TILE)
    return out


def room(budget: int) -> int:
    """Bytes that a forecast may come to."""
    return max(int(budget / MARGIN), budget - MOST)


def choose(
    need: Need,
    *,
    wanted_block: int,
    fixed_block: bool,
    dtypes: list[torch.dtype],
    accumulate: int,
    max_accumulate: int,
    low_memory: bool,
    budget: int | None,
) -> Plan:
    """The first arrangement that fits the budget, giving up as little as possible.

    First precision (rounded directions do not change results measurably), then the batch in as few pieces as will do,
    then the block size unless the user fixed it, then low-memory mode, again in as few pieces as will do. The last
    resort is returned even if it does not fit.
    """

    def plan(b: int, dtype: torch.dtype, pieces: int, low: bool, reason: str) -> Plan:
        # In several pieces, gradients that add up are projected once and single ones for every piece.
        single = need.parameters >= LARGE and not low and pieces == 1
        whole = parts(need, b, dtype, pieces, low, single)
        if need.parameters >= LARGE and not low and asked is not None and sum(whole.values()) > room(asked):
            single, whole = True, parts(need, b, dtype, pieces, low, True)
        return Plan(b, dtype, pieces, low, b < need.models, whole, asked, reason, single)

    asked = budget

    best = plan(wanted_block, dtypes[0], accumulate, low_memory, "fits")
    if budget is None:
        return replace(best, reason="no limit known")
    budget = room(budget)
    if best.total <= budget:
        return best
    for dtype in dtypes[1:]:
        best = plan(wanted_block, dtype, accumulate, low_memory, f"{NAMES[dtypes[0]]} would not fit")
        if best.total <= budget:
            return best
    dtype = dtypes[-1]
    cuts = [accumulate]
    while need.sample and cuts[-1] * 2 <= max_accumulate:  # without activations to save, pieces save nothing
        cuts.append(cuts[-1] * 2)
    blocks = [wanted_block]
    while not fixed_block and blocks[-1] > 1:
        blocks.append(blocks[-1] // 2)
    for b in blocks:
        reason = "the whole batch would not fit" if b == wanted_block else f"{wanted_block} models would not fit"
        for pieces in cuts:
            best = plan(b, dtype, pieces, low_memory, reason)
            if best.total <= budget:
                return best
    for pieces in cuts:
        best = plan(blocks[-1], dtype, pieces, True, "gradients would not fit at once")
        if best.total <= budget:
            return best
    return replace(best, reason="may not fit: the smallest arrangement there is")
