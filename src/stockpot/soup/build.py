"""(pool, layout, W) -> tensors, streaming: each tensor of each ingredient is read once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import torch
from torch import Tensor

from stockpot.events import Listener, ignore, progress
from stockpot.layout import EXCLUDED, FROZEN, INTEGER, STATISTIC, Layout
from stockpot.pool import Pool
from stockpot.soup.finite import check_holds
from stockpot.soup.mix import mix_statistic, mix_tensor
from stockpot.soup.weights import heaviest

THREADS = 4  # eight were slower on 16 slow cores
MANY = 8  # cores, from which torch's threads do better on one operation than ours on several
AHEAD = 1 << 28  # values mixed and not yet asked for: 1 GiB as fp32


def tensors(
    pool: Pool,
    layout: Layout,
    W: Tensor,
    *,
    statistics: Mapping[str, Tensor] | None = None,
    copy_statistics: bool = False,
    dtype: torch.dtype | None = None,
    free: bool = False,
    alone: bool = True,
    listen: Listener = ignore,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the soup under its name, in the pool's order and the ingredients' dtype.

    Not mixed are: frozen tensors (copied), excluded ones (the donor's), integers and booleans (the heaviest
    ingredient's), and running statistics (`statistics` if given, else the heaviest ingredient's or the average).
    `alone` says that nothing else keeps the cores busy meanwhile: threads that share an operation wait for the slowest.
    """
    wide = alone and torch.get_num_threads() >= MANY
    columns = W.T.tolist()  # (G, K)
    heavy = heaviest(W)
    overall = W.mean(dim=1).tolist()  # (K,)
    models = range(len(pool))

    def value(name: str) -> Tensor:
        reason, spec = layout.kept.get(name), pool.specs[name]
        if statistics is not None and name in statistics:
            return statistics[name]
        if reason in (FROZEN, EXCLUDED):
            return pool.tensor(layout.donor, name)
        if reason == INTEGER or (
            reason == STATISTIC and (copy_statistics or not spec.dtype.is_floating_point)
        ):
            return pool.tensor(heavy, name)
        parts = [pool.tensor(k, name) for k in models]
        mixed = (
            mix_statistic(parts, overall)
            if reason == STATISTIC
            else mix_tensor(parts, columns[layout.group_of[name]], free=free, wide=wide)
        )
        check_holds(mixed, name, dtype if dtype is not None else spec.dtype)
        return mixed

    first_of = {name: names[0] for names in layout.tied for name in names}
    tied: dict[str, Tensor] = {}  # made once under the first name
    total = sum(spec.nbytes for spec in pool.specs.values())
    written = 0
    names = [name for name in pool.specs if first_of.get(name, name) == name]
    threads = 1 if wide else min(THREADS, os.cpu_count() or 1)
    with closing(_ahead(value, names, lambda name: pool.specs[name].numel, threads)) as values:
        for name, spec in pool.specs.items():
            first = first_of.get(name, name)
            if first != name:
                made = tied[first].clone()  # files do not share storage
            else:
                made = next(values)
                if name in first_of:
                    tied[name] = made
            written += spec.nbytes
            progress(listen, "building the soup", written, total)
            yield name, made.to(dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype)


def _ahead(
    function: Callable[[str], Tensor], names: Iterable[str], size: Callable[[str], int], threads: int
) -> Generator[Tensor, None, None]:
    """The function of each name, in order, a few of them computed ahead on other threads."""
    waiting: deque[tuple[Future[Tensor], int]] = deque()
    held = 0
    pool = ThreadPoolExecutor(threads, "stockpot-mix")
    try:
        for name in names:
            while waiting and (len(waiting) > threads or held + size(name) > AHEAD):
                made, values = waiting.popleft()
                held -= values
                yield made.result()
            waiting.append((pool.submit(function, name), size(name)))
            held += size(name)
        while waiting:
            yield waiting.popleft()[0].result()
    finally:
        pool.shutdown(cancel_futures=True)
