"""The memory plan: how learning fits a device, decided before it starts and said in one line.

What learning holds, in bytes, with P parameters in the model's dtype (w bytes each) and b models loaded:
directions b P (4, 2 or 1), the soup's fixed part 4 P (2 P where checkpoints and model are bf16), the model w P,
gradients 2 w P (the parameters' own, and all of them flat for the projection; nothing where each is projected and
freed as backward makes it), and what a forward and backward pass needs besides: activations, logits and their gradient
in fp32. A trial run measures that on parts of a batch, with gradients freed as they come: they would hide how fast the
rest grows with the batch, because they are at their most when the activations are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stockpot import ranks
from stockpot.engine.directions import row_bytes
from stockpot.engine.live import Live
from stockpot.engine.low_memory import gradients_freed, recomputing
from stockpot.task import Data

NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
ROUNDED = [torch.bfloat16, torch.int8]  # where memory is short, on CUDA: the first, then what takes less
MARGIN = 1.08  # what a forecast may be off without breaking the budget
MOST = 2 * 2**30  # bytes it may be off at most: what is large (directions, weights) is known to the byte
LARGE = 2**28  # parameters; above, a launch for each tensor costs less than a flat copy of its gradient
_PIECES = 4 * 4 * 2**22  # the loader's buffers, a piece and what it may run over


@dataclass(frozen=True)
class Options:
    """How learning runs; the fields of the same names in soups/settings.py say what they mean."""

    batch_size: int = 128
    accumulate: int = 1
    directions: str = "auto"
    memory: int | None = None
    low_memory: bool = False
    compile: bool = False
    graphs: bool = True


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
    step, sample = need.step, need.sample
    if low_memory:
        step, sample = need.spared or (step, sample / 3)
    return {
        "directions": block_size * row_bytes(dtype, P),
        "soup": need.held_models * P * need.soup_width,
        "model": P * need.model_width + need.kept,
        "gradients": 0 if low_memory or one_by_one else 2 * P * need.model_width,
        "step": step + int(sample * -(-need.batch // accumulate)),
        "data": need.data,
        "buffers": min(_PIECES, 16 * P),
    }


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
    large = need.parameters >= LARGE

    def arrangements() -> Iterator[tuple[int, torch.dtype, int, bool, str]]:
        yield wanted_block, dtypes[0], accumulate, low_memory, "fits"
        for dtype in dtypes[1:]:
            yield wanted_block, dtype, accumulate, low_memory, f"{NAMES[dtypes[0]]} would not fit"
        cuts = [accumulate]
        while need.sample and cuts[-1] * 2 <= max_accumulate:  # without activations to save, pieces save nothing
            cuts.append(cuts[-1] * 2)
        blocks = [wanted_block]
        while not fixed_block and blocks[-1] > 1:
            blocks.append(blocks[-1] // 2)
        for b in blocks:
            reason = "the whole batch would not fit" if b == wanted_block else f"{wanted_block} models would not fit"
            for pieces in cuts:
                yield b, dtypes[-1], pieces, low_memory, reason
        for pieces in cuts:
            yield blocks[-1], dtypes[-1], pieces, True, "gradients would not fit at once"

    for b, dtype, pieces, low, reason in arrangements():
        # In several pieces, gradients that add up are projected once and single ones for every piece.
        single = large and not low and pieces == 1
        whole = parts(need, b, dtype, pieces, low, single)
        if large and not low and budget is not None and sum(whole.values()) > room(budget):
            single, whole = True, parts(need, b, dtype, pieces, low, True)
        found = Plan(b, dtype, pieces, low, b < need.models, whole, budget, reason, single)
        if budget is None:
            return replace(found, reason="no limit known")
        if found.total <= room(budget):
            return found
    return replace(found, reason="may not fit: the smallest arrangement there is")


# What this task and this machine ask for -----------------------------------------------------------------


def planned(live: Live, options: Options, data: Data, block_size: int, fixed_block: bool) -> Plan:
    """The plan for this model, data and device."""
    task, o, cuda = live.task, options, live.device.type == "cuda"
    if live.factored:
        dtypes = [live.dtype]
    elif o.directions != "auto":
        dtypes = [DTYPES[o.directions]]
    elif cuda and live.dtype == torch.float32:
        dtypes = ROUNDED
    else:
        dtypes = [live.dtype]
    step, sample, kept, spared = 0, 0.0, 0, None
    if cuda:
        held = [*task.model.parameters(), *task.model.buffers()]
        kept = max(0, sum(ranks.local(t).nbytes for t in held) - (0 if live.sharded else live.flat.nbytes))
        if o.low_memory or live.plan.size >= LARGE:
            with recomputing(task.model):
                spared = measured(live, o.batch_size, data)
        # Where it is low-memory mode already, the other might not fit, nor its trial.
        step, sample = spared if spared and o.low_memory else measured(live, o.batch_size, data)
    free, batch = free_memory(live.device), min(o.batch_size, len(data))
    # Data is kept on the device when it takes little of what is free there.
    resident = free is not None and data.columns is not None and o.memory is None and data.nbytes < free // 8
    need = Need(
        models=len(live.pool),
        parameters=live.plan.size,
        model_width=live.flat.element_size(),
        held_models=1 if cuda else 3,  # theta_fix; elsewhere theta_bar and a row to read into as well
        batch=batch,
        step=step,
        sample=sample,
        data=data.nbytes if resident else 0,
        kept=kept + live.beside,
        soup_width=live.soup_dtype.itemsize if cuda else 4,
        spared=spared,
    )
    limit = o.memory
    if limit is None and free is not None:
        limit = int(0.92 * free) + torch.cuda.memory_allocated(live.device)
    if limit is None and not fixed_block and (host := host_memory()) is not None:
        limit = host // 2  # what is free changes from run to run, results should not
    return choose(
        need,
        wanted_block=block_size,
        fixed_block=fixed_block,
        dtypes=dtypes,
        accumulate=o.accumulate,
        max_accumulate=max(o.accumulate, batch // 8 if task.may_be_cut else 1),
        low_memory=o.low_memory,
        budget=limit,
    )


def measured(live: Live, batch_size: int, data: Data) -> tuple[int, float]:
    """Peak bytes of a forward and backward pass without the gradients, as a constant and per sample.

    Parts of a batch are measured, so that this cannot run out of memory itself.
    """
    task, size, peaks = live.task, min(batch_size, len(data)), []
    sizes = sorted({max(1, size // 8), max(1, size // 4)})
    with task.learning(), gradients_freed(live):
        for n in sizes:
            batch = task.to_device(data.batch(torch.arange(n)))
            for _ in range(2):  # the first pass also pays for libraries
                torch.cuda.synchronize(live.device)
                torch.cuda.reset_peak_memory_stats(live.device)
                before = torch.cuda.memory_allocated(live.device)
                task.loss(batch).mean.backward()  # type: ignore[no-untyped-call]
                peak = torch.cuda.max_memory_allocated(live.device) - before
            peaks.append(peak)
            del batch
    torch.cuda.empty_cache()
    if len(sizes) == 1:
        return 0, peaks[0] / sizes[0]
    slope = max(0.0, (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]))
    return max(0, int(peaks[0] - slope * sizes[0])), slope


def free_memory(device: torch.device) -> int | None:
    """Bytes a CUDA device can still give, what PyTorch holds unused included. None elsewhere."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def host_memory() -> int | None:
    """Bytes that this process may take in all: the machine's, or less where its container is limited. None: unknown."""
    try:
        machine: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        machine = None
    known = [limit for limit in (machine, *container_limits()) if limit is not None]
    return min(known, default=None)


def container_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Memory limits of this process's control groups (version 2 or 1), its own and those it lies in."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if controllers in ("", "name=systemd"):
            base, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = base / place.strip("/")
        for folder in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # "max" is no limit
                found.append(int((folder / file).read_text()))
            if folder == base:
                break
    return [limit for limit in found if limit < 1 << 60]  # version 1 writes a huge number for none
