"""From memory-mapped checkpoints to the block of directions on the device.

`Loader` reads straight into the block. `StreamingLoader`, for CUDA, moves the files through two pinned buffers piece by
piece, subtracts theta_bar and rounds on the device, and can prepare the next block in host memory (as it will lie on
the device, so int8 takes a quarter of the files) while the current one is learned.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from stockpot.engine.directions import SCALED, Directions, Tiles, encode_plain
from stockpot.engine.live import Live
from stockpot.events import Listener, ignore, progress

PIECE = 1 << 21  # parameters moved at once: 8 MiB as fp32
PREFETCHED = (
    8 << 30
)  # bytes of a block at most that is prepared in host memory; a larger one is read when its turn comes


Read = Callable[[int, Tensor], Tensor]  # ingredient k as a flat vector (P,), into out: (P,)


@contextmanager
def reading_ahead(live: Live, order: Iterable[int]) -> Iterator[Read]:
    """Ingredients in an order that is known, the next one on another thread while the GPU works on this one.

    On other devices, and where an ingredient is large, it is read when it is asked for.
    """
    left = deque(order)
    if not left or live.device.type != "cuda" or live.plan.size * live.dtype.itemsize > PREFETCHED // 4:
        yield live.read
        return
    buffer = torch.empty(live.plan.size, dtype=live.dtype, pin_memory=True)  # (P,)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    threads = ThreadPoolExecutor(1, "stockpot-ahead")

    def fill(k: int) -> Tensor:
        copied.synchronize()  # the buffer is free again
        return live.read(k, out=buffer)

    waiting = deque([(left[0], threads.submit(fill, left.popleft()))])

    def read(k: int, out: Tensor) -> Tensor:
        if not waiting or waiting[0][0] != k:
            return live.read(k, out)
        out.copy_(waiting.popleft()[1].result(), non_blocking=True)
        copied.record()
        if left:
            waiting.append((left[0], threads.submit(fill, left.popleft())))
        return out

    try:
        yield read
    finally:
        threads.shutdown(cancel_futures=True)


class LastBlock:
    """The rows that were loaded last, for the next learner of a comparison: most of them want all models again."""

    def __init__(self) -> None:
        self.key: object = None
        self.rows: tuple[Tensor, Tensor | None] | None = None  # (b, P), and scales for int8

    def clear(self) -> None:
        self.key = self.rows = None


class Loader:
    """Blocks of directions on any device, by plain PyTorch."""

    def __init__(self, live: Live, dtype: torch.dtype | None = None, last: LastBlock | None = None) -> None:
        self.live = live
        self._last = LastBlock() if last is None else last
        self.dtype = dtype or live.dtype
        self.waited = 0.0  # seconds spent until blocks were there
        self._tiles = live.tiles
        if self.dtype in SCALED and self._tiles is None:
            self._tiles = Tiles.of(live.plan, live.device)

    def mean(self, listen: Listener = ignore) -> Tensor:
        """theta_bar. (P,)"""
        return self.live.mean(listen=listen)

    def load(self, block: list[int], theta_bar: Tensor) -> Directions:
        """d_k = theta_k - theta_bar of the block's models, on the device."""
        began = time.perf_counter()
        live = self.live
        key = (live.places, live.device, self.dtype, block)
        if self._last.rows is not None and self._last.key == key:
            return Directions(self._last.rows[0], live.plan, tiles=self._tiles, tile_scale=self._last.rows[1])
        self._last.clear()  # the old block is freed before the next one is loaded
        rows = torch.empty(len(block), live.plan.size, dtype=self.dtype, device=live.device)  # (b, P)
        scale: Tensor | None = None
        if self.dtype in SCALED:
            assert self._tiles is not None
            scale = torch.empty(self._tiles.count, len(block), device=live.device)
        exact = self.dtype == live.dtype
        row = None if exact else torch.empty(live.plan.size, dtype=live.dtype, device=live.device)
        for i, k in enumerate(block):
            target = rows[i] if row is None else row
            live.read(k, out=target).sub_(theta_bar)
            if row is not None:
                encode_plain(row, rows[i], None if scale is None else scale[:, i], live.plan, self._tiles)
        self.waited += time.perf_counter() - began
        self._last.key, self._last.rows = key, (rows, scale)
        return Directions(rows, live.plan, tiles=self._tiles, tile_scale=scale)

    def add(self, theta: Tensor, alpha: Tensor, theta_bar: Tensor) -> Tensor:
        """theta + sum_k alpha_k (theta_k - theta_bar), in place, from the files; models without a share are not read.

        theta, theta_bar: (P,); alpha: (K, G)
        """
        row = torch.empty_like(theta)
        for k in alpha.ne(0).any(dim=1).nonzero().flatten().tolist():
            self.live.read(k, out=row).sub_(theta_bar)
            for (start, stop), share in zip(self.live.plan.bounds, alpha[k].tolist(), strict=True):
                theta[start:stop].add_(row[start:stop], alpha=share)
        return theta

    def prefetch(self, block: list[int], theta_bar: Tensor) -> None:
        """Begin to prepare the block that is asked for next, where that helps."""

    def close(self) -> None:
        """Wait for whatever is under way."""

    def free(self) -> None:
        """Give the memory of the block back, whoever still refers to it."""


class StreamingLoader(Loader):
    """The same on CUDA: every piece of a file crosses the bus once, rounding happens on the device."""

    def __init__(self, live: Live, dtype: torch.dtype, block_size: int) -> None:
        super().__init__(live, dtype)
        assert live.tiles is not None
        self._tiling = live.tiles
        size, device = live.plan.size, live.device
        self._pieces = _pieces(self._tiling)
        widest = max(hi - lo for lo, hi, _, _ in self._pieces)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        held = live.soup_dtype
        self._pinned = [torch.empty(widest, dtype=held, pin_memory=True) for _ in range(2)]
        self._arrived = [torch.empty(widest, dtype=held, device=device) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._centre_piece = torch.empty(widest, device=device)
        self._row_piece = torch.empty(widest, dtype=dtype, device=device)
        # One buffer for all blocks: graphs that were captured with it stay valid.
        self._rows = torch.empty(block_size, size, dtype=dtype, device=device)  # (b, P)
        self._scale = torch.empty(self._tiling.count * block_size, device=device) if dtype in SCALED else None
        self._waiting: tuple[list[int], threading.Thread] | None = None
        self._host_rows: Tensor | None = None
        self._host_scale: Tensor | None = None
        self._failed: BaseException | None = None

    def mean(self, listen: Listener = ignore) -> Tensor:
        # On the host: pieces of it go along with the models.
        out = torch.empty(self.live.plan.size, dtype=self.live.soup_dtype, pin_memory=True)
        total = self._centre_piece
        with torch.cuda.stream(self._stream):
            for lo, hi, _, _ in self._pieces:
                here = total[: hi - lo]
                for k in range(len(self.live.pool)):
                    piece = self._upload(k, lo, hi)
                    if k == 0:
                        here.copy_(piece)
                    else:
                        here.lerp_(piece.float(), 1.0 / (k + 1))  # a running mean: identical models stay identical
                out[lo:hi].copy_(here.to(out.dtype), non_blocking=True)
                self._stream.synchronize()
                progress(listen, "averaging the ingredients", hi, self.live.plan.size, "parameters")
        return out

    def load(self, block: list[int], theta_bar: Tensor) -> Directions:
        began = time.perf_counter()
        rows = self._rows[: len(block)]
        scale = None if self._scale is None else self._scale[: self._tiling.count * len(block)].view(-1, len(block))
        torch.cuda.synchronize(self.live.device)  # nobody reads the old block any more
        if self._waiting is not None and self._waiting[0] == block:
            self._waiting[1].join()
            self._waiting = None
            if self._failed is not None:
                raise self._failed
            assert self._host_rows is not None
            rows.copy_(self._host_rows[: len(block)], non_blocking=True)
            if scale is not None:
                assert self._host_scale is not None
                scale.copy_(self._host_scale[: scale.numel()].view_as(scale), non_blocking=True)
        else:
            self.close()
            self._encode(block, theta_bar, rows, scale)
        torch.cuda.synchronize(self.live.device)
        self.waited += time.perf_counter() - began
        return Directions(rows, self.live.plan, tiles=self._tiling, tile_scale=scale)

    def add(self, theta: Tensor, alpha: Tensor, theta_bar: Tensor) -> Tensor:
        models = alpha.ne(0).any(dim=1).nonzero().flatten().tolist()
        shares = alpha.to(self.live.device, torch.float32)  # (K, G)
        if self._waiting is not None:
            self._waiting[1].join()  # it uses the same buffers; what it prepared stays
        torch.cuda.synchronize(self.live.device)
        with torch.cuda.stream(self._stream):
            for lo, hi, first, count in self._pieces if models else []:
                tiles = slice(first, first + count)
                group = self._tiling.group[tiles].repeat_interleave(self._tiling.length[tiles])  # (hi - lo,)
                middle = self._centre(theta_bar, lo, hi)
                total = theta[lo:hi].float()  # only a piece at a time, where theta is bf16
                for k in models:
                    total.addcmul_(self._upload(k, lo, hi) - middle, shares[k][group])
                theta[lo:hi].copy_(total)
            self._stream.synchronize()
        return theta

    def prefetch(self, block: list[int], theta_bar: Tensor) -> None:
        self.close()
        if self._rows.nbytes > PREFETCHED:
            return
        if self._host_rows is None:
            self._host_rows = torch.empty(self._rows.shape, dtype=self.dtype, pin_memory=True)
            if self._scale is not None:
                self._host_scale = torch.empty(self._scale.shape, pin_memory=True)
        thread = threading.Thread(target=self._prepare, args=(block, theta_bar), name="stockpot-prefetch", daemon=True)
        self._waiting, self._failed = (block, thread), None
        thread.start()

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting[1].join()
            self._waiting = None

    def free(self) -> None:
        self._rows.untyped_storage().resize_(0)

    def _prepare(self, block: list[int], theta_bar: Tensor) -> None:
        assert self._host_rows is not None
        scale = self._host_scale
        try:
            columns = None if scale is None else scale[: self._tiling.count * len(block)].view(-1, len(block))
            self._encode(block, theta_bar, self._host_rows[: len(block)], columns)
        except BaseException as error:  # reaches the learner when it asks for the block
            self._failed = error

    def _encode(self, block: list[int], theta_bar: Tensor, rows: Tensor, scale: Tensor | None) -> None:
        """Fill rows (b, P) and scale (tiles, b), on the device or in pinned host memory."""
        from stockpot.engine import kernels

        near = rows.is_cuda
        fresh = torch.empty(scale.shape, device=self.live.device) if scale is not None and not near else scale
        with torch.cuda.stream(self._stream):
            for lo, hi, first, count in self._pieces:
                middle = self._centre(theta_bar, lo, hi)
                for i, k in enumerate(block):
                    target = rows[i, lo:hi] if near else self._row_piece[: hi - lo]
                    kernels.encode(
                        self._upload(k, lo, hi), middle, target, fresh, self._tiling,
                        first=first, count=count, offset=lo, models=len(block), k=i,
                    )  # fmt: skip
                    if not near:
                        rows[i, lo:hi].copy_(target, non_blocking=True)
            if scale is not None and fresh is not None and not near:
                scale.copy_(fresh, non_blocking=True)
            self._stream.synchronize()

    def _centre(self, theta_bar: Tensor, lo: int, hi: int) -> Tensor:
        """A piece of theta_bar on the device, in fp32; call on the loader's stream."""
        middle = self._centre_piece[: hi - lo]
        return middle.copy_(theta_bar[lo:hi].to(middle.device, non_blocking=True))

    def _upload(self, k: int, lo: int, hi: int) -> Tensor:
        """A piece of ingredient k on the device; call on the loader's stream."""
        turn = self._turn
        self._turn = 1 - turn
        self._copied[turn].synchronize()  # the pinned buffer is free again
        pinned = self.live.read_range(k, lo, hi, self._pinned[turn][: hi - lo])
        arrived = self._arrived[turn][: hi - lo]
        arrived.copy_(pinned, non_blocking=True)
        self._copied[turn].record(self._stream)
        return arrived


def _pieces(tiles: Tiles) -> list[tuple[int, int, int, int]]:
    """(lo, hi, first tile, tiles) of stretches of about PIECE parameters that end where tiles end."""
    starts, lengths = tiles.start.tolist(), tiles.length.tolist()
    out: list[tuple[int, int, int, int]] = []
    first = 0
    for t, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if start + length - starts[first] >= PIECE or t + 1 == len(starts):
            out.append((starts[first], start + length, first, t + 1 - first))
            first = t + 1
    return out
