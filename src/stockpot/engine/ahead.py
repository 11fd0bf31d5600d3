"""Kernels compiled while the files are still being read.

The first run on a machine spends seconds on compiling them. Before the directions are known nobody needs a GPU, so that
a thread can do it meanwhile, on vectors of one tile. What goes wrong here goes wrong again where it is needed, and is
told there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

import torch

from stockpot.engine.budget import DTYPES
from stockpot.engine.tiles import ALIGN, Tiles

_at_work: list[threading.Thread] = []


def begin(device: torch.device, directions: Iterable[str], narrow: torch.dtype) -> None:
    """For directions kept like these (the names of `Settings.directions`) and a model whose weights are `narrow`."""
    if device.type != "cuda":
        return
    kinds = sorted({"bf16" if kind == "auto" else kind for kind in directions} - {"fp64"})
    if not kinds:
        return
    thread = threading.Thread(target=_compile, args=(device, kinds, narrow), name="stockpot-compile")
    _at_work.append(thread)
    thread.start()


def finish() -> None:
    """Wait for it: a graph cannot be captured while another thread uses the device."""
    while _at_work:
        _at_work.pop().join()


def _compile(device: torch.device, kinds: list[str], narrow: torch.dtype) -> None:
    with contextlib.suppress(Exception):
        from stockpot.engine import kernels

        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            tiles = _one_tile(device)
            for kind in kinds:
                rows = torch.zeros(2, ALIGN, dtype=DTYPES[kind], device=device)
                scale = torch.zeros(1, 2, device=device) if rows.dtype == torch.int8 else None
                flat, weights = torch.zeros(ALIGN, device=device), torch.zeros(2, 1, device=device)
                kernels.encode(
                    flat, flat.clone(), rows[0], scale, tiles, first=0, count=1, offset=0, models=2, k=0
                )
                for dtype in {torch.float32, narrow}:
                    kernels.mix(
                        rows, flat, weights, torch.zeros(ALIGN, dtype=dtype, device=device), tiles, scale
                    )
                kernels.project(rows, torch.zeros(ALIGN, dtype=narrow, device=device), tiles, scale)
            torch.cuda.current_stream(device).synchronize()


def _one_tile(device: torch.device) -> Tiles:
    def numbers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Tiles(numbers(0, dtype=torch.int64), numbers(ALIGN), numbers(0), numbers(0, 1))
