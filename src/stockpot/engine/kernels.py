"""The two operations of engine/directions.py, and the encoding of directions, as Triton kernels.

All are bound by memory: each element of the directions is read once. Sums are deterministic: a tile's partial sum is
written to its own place and a second kernel adds those of a group in a fixed order. Offsets `k * P` are 64-bit: they
pass 2^31 at 72 models of 88M parameters. Imported only where a CUDA device is used.
"""

from __future__ import annotations

import contextlib
import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from stockpot.engine.directions import ALIGN, SCALED, TILE, Tiles

Shape = tuple[int, int]  # rows of D loaded together, warps
# Measured on an H200 (benchmarks/kernel_speed.py --tune): the fastest or within a few per cent of it for b of 4 to 72.
_PROJECT: dict[torch.dtype, Shape] = {torch.float32: (1, 8), torch.bfloat16: (1, 8), torch.int8: (1, 4)}
_MIX: dict[torch.dtype, Shape] = {torch.float32: (2, 8), torch.bfloat16: (4, 8), torch.int8: (1, 16)}


# Triton compiles anew for numbers that are 1 or a multiple of 16. For counts and places among tiles that brings
# nothing, and took seconds of every first run: `k` alone made three kernels of `_encode_tiles`. `end` is another
# matter: it is in the mask of the gradient, which is loaded 16 bytes at a time only if `end` is known to be aligned.
@triton.jit(do_not_specialize=["b", "first"])
def _project_tiles(
    D, G, SCALE, PART, START, LENGTH, P, b, first, offset, end,
    BK: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    tile = first + tl.program_id(0).to(tl.int64)
    start = tl.multiple_of(tl.load(START + tile), 128)
    length = tl.multiple_of(tl.load(LENGTH + tile), 128)
    columns = tl.arange(0, TILE)
    inside = columns < length
    # The gradient may be one tensor's own: it begins at `offset` of the flat vector and stops at `end`.
    there = inside & (start + columns < end)
    g = tl.load(G + (start - offset) + columns, mask=there, other=0.0).to(tl.float32)  # (TILE,)
    for k0 in range(0, b, BK):
        k = k0 + tl.arange(0, BK)
        known = k < b
        rows = k.to(tl.int64)[:, None] * P + start
        d = tl.load(D + rows + columns[None, :], mask=known[:, None] & inside[None, :], other=0)
        part = tl.sum(d.to(tl.float32) * g[None, :], axis=1)  # (BK,)
        if SCALED:
            part *= tl.load(SCALE + tile * b + k, mask=known, other=0.0)
        if ADD:
            part += tl.load(PART + tile * b + k, mask=known, other=0.0)
        tl.store(PART + tile * b + k, part, mask=known)


@triton.jit(do_not_specialize=["b", "groups"])
def _add_tiles(PART, OUT, FIRST, b, groups, BK: tl.constexpr, BT: tl.constexpr):
    j = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    known = k < b
    end = tl.load(FIRST + j + 1)
    total = tl.zeros((BT, BK), dtype=tl.float32)
    for t0 in range(tl.load(FIRST + j), end, BT):
        t = t0 + tl.arange(0, BT)
        places = t.to(tl.int64)[:, None] * b + k[None, :]
        total += tl.load(PART + places, mask=(t < end)[:, None] & known[None, :], other=0.0)
    tl.store(OUT + k * groups + j, tl.sum(total, axis=0), mask=known)


@triton.jit(do_not_specialize=["b", "groups"])
def _mix_tiles(
    D, FIXED, C, SCALE, OUT, START, LENGTH, GROUP, P, b, groups,
    BK: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr, DITHER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tl.multiple_of(tl.load(START + tile), 128)
    length = tl.multiple_of(tl.load(LENGTH + tile), 128)
    j = tl.load(GROUP + tile)
    columns = tl.arange(0, TILE)
    inside = columns < length
    total = tl.load(FIXED + start + columns, mask=inside, other=0.0).to(tl.float32)  # (TILE,)
    if DITHER:
        # A bf16 number plus less than half its last digit would round back to itself, and small steps of the
        # coefficients would do nothing at all. So every element stands somewhere else between its two roundings, at a
        # place drawn once from its index: small steps move their share of the elements, and none moves none.
        bits = total.to(tl.int32, bitcast=True)
        digit = (bits & 0x7F800000).to(tl.float32, bitcast=True) * 0.0078125
        digit = tl.where((bits & 0x007FFFFF) == 0, 0.5 * digit, digit)  # below a power of two digits are half as wide
        draw = (start + columns).to(tl.uint32) * 2654435761
        draw = (draw ^ (draw >> 16)) * 2246822507
        draw = draw ^ (draw >> 13)
        total += (draw.to(tl.float32) * 2.3283064365386963e-10 - 0.5) * 0.9999 * digit
    for k0 in range(0, b, BK):
        k = k0 + tl.arange(0, BK)
        known = k < b
        c = tl.load(C + k * groups + j, mask=known, other=0.0)
        if SCALED:
            c *= tl.load(SCALE + tile * b + k, mask=known, other=0.0)
        rows = k.to(tl.int64)[:, None] * P + start
        d = tl.load(D + rows + columns[None, :], mask=known[:, None] & inside[None, :], other=0)
        total += tl.sum(d.to(tl.float32) * c[:, None], axis=0)
    tl.store(OUT + start + columns, total.to(OUT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "b", "k"])
def _encode_tiles(
    X, CENTRE, ROW, SCALE, START, LENGTH, first, offset, b, k,
    TILE: tl.constexpr, SCALED: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    tile = first + tl.program_id(0).to(tl.int64)
    start = tl.multiple_of(tl.load(START + tile), 128) - offset
    length = tl.multiple_of(tl.load(LENGTH + tile), 128)
    columns = tl.arange(0, TILE)
    inside = columns < length
    x = tl.load(X + start + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x -= tl.load(CENTRE + start + columns, mask=inside, other=0.0)
    if SCALED:
        largest = tl.max(tl.abs(x), axis=0)
        # Below the smallest normal number the scale itself is rounded; such a tile counts as zero.
        scale = largest / 127.0
        scale = tl.where(scale >= 1.1754943508222875e-38, scale, 0.0)
        x = tl.where(scale > 0, x / scale, 0.0)
        x = tl.floor(x + 0.5)
        tl.store(SCALE + tile * b + k, scale)
    tl.store(ROW + start + columns, x.to(ROW.dtype.element_ty), mask=inside)


def project(rows: Tensor, gradient: Tensor, tiles: Tiles, scale: Tensor | None, shape: Shape | None = None) -> Tensor:
    """rows: (b, P) fp32, bf16 or int8; gradient: (P,); scale: (tiles, b) for int8 -> (b, G) fp32"""
    partial = torch.empty(tiles.count, rows.shape[0], dtype=torch.float32, device=rows.device)
    project_part(
        rows, gradient, tiles, scale, partial, first=0, count=tiles.count, offset=0, end=rows.shape[1],
        add=False, shape=shape,
    )  # fmt: skip
    return add_parts(partial, tiles)


def project_part(
    rows: Tensor,
    gradient: Tensor,
    tiles: Tiles,
    scale: Tensor | None,
    partial: Tensor,
    *,
    first: int,
    count: int,
    offset: int,
    end: int,
    add: bool,
    shape: Shape | None = None,
) -> None:
    """Partial sums (tiles, b) of some tiles, from a gradient that covers the flat vector from offset to end."""
    b, size = rows.shape
    block, warps = shape or _PROJECT[rows.dtype]
    _project_tiles[(count,)](
        rows, gradient, scale, partial, tiles.start, tiles.length, size, b, first, offset, end,
        BK=block, TILE=TILE, SCALED=scale is not None, ADD=add, num_warps=warps,
    )  # fmt: skip


def add_parts(partial: Tensor, tiles: Tiles) -> Tensor:
    """(tiles, b) -> (b, G)"""
    b, groups = partial.shape[1], tiles.first.numel() - 1
    out = torch.empty(b, groups, dtype=torch.float32, device=partial.device)
    few = 16
    _add_tiles[(groups, triton.cdiv(b, few))](partial, out, tiles.first, b, groups, BK=few, BT=64, num_warps=4)
    return out


def mix(
    rows: Tensor,
    fixed: Tensor,
    coefficients: Tensor,
    out: Tensor,
    tiles: Tiles,
    scale: Tensor | None,
    shape: Shape | None = None,
) -> None:
    """out = fixed + sum_k c_k d_k. fixed: (P,) fp32 or bf16; coefficients: (b, G) fp32; out: (P,) any dtype

    Where both fixed and out are bf16, rounding is without bias in the mean over elements.
    """
    b, size = rows.shape
    block, warps = shape or _MIX[rows.dtype]
    _mix_tiles[(tiles.count,)](
        rows, fixed, coefficients, scale, out, tiles.start, tiles.length, tiles.group, size, b,
        coefficients.shape[1], BK=block, TILE=TILE, SCALED=scale is not None,
        DITHER=fixed.dtype == out.dtype == torch.bfloat16, num_warps=warps,
    )  # fmt: skip


def encode(
    x: Tensor,
    centre: Tensor | None,
    row: Tensor,
    scale: Tensor | None,
    tiles: Tiles,
    *,
    first: int,
    count: int,
    offset: int,
    models: int,
    k: int,
) -> None:
    """A stretch of model k as a direction: row = x - centre, rounded to row's dtype.

    x, centre, row hold the stretch that starts at `offset` of the flat vector: tiles `first` to `first + count`.
    scale: (tiles, models), filled at column k for int8.
    """
    _encode_tiles[(count,)](
        x, centre, row, scale, tiles.start, tiles.length, first, offset, models, k,
        TILE=TILE, SCALED=scale is not None, CENTRED=centre is not None, num_warps=8,
    )  # fmt: skip


def compile_ahead(device: torch.device, dtype: torch.dtype, narrow: torch.dtype, held: torch.dtype) -> threading.Thread:
    """Compile what directions of this dtype, a model of `narrow` weights and a soup held in `held` need, on one tile.

    The first run on a machine spends seconds on it; a thread can do it while the files are averaged. What goes wrong
    here goes wrong again where it is needed, and is told there. Wait for the thread before a graph is captured.
    """

    def numbers(*values: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    def work() -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            tiles = Tiles(numbers(0, kind=torch.int64), numbers(ALIGN), numbers(0), numbers(0, 1))
            rows = torch.zeros(2, ALIGN, dtype=dtype, device=device)
            scale = torch.zeros(1, 2, device=device) if dtype in SCALED else None
            flat, alpha = torch.zeros(ALIGN, device=device), torch.zeros(2, 1, device=device)
            encode(flat.to(held), flat.clone(), rows[0], scale, tiles, first=0, count=1, offset=0, models=2, k=0)
            for kind in {torch.float32, narrow}:
                mix(rows, flat.to(held), alpha, torch.zeros(ALIGN, dtype=kind, device=device), tiles, scale)
            project(rows, torch.zeros(ALIGN, dtype=narrow, device=device), tiles, scale)
            torch.cuda.current_stream(device).synchronize()

    thread = threading.Thread(target=work, name="stockpot-compile")
    thread.start()
    return thread
