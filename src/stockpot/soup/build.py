"""(pool, layout, W) -> tensors, streaming: each tensor of each ingredient is read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from stockpot.events import Listener, ignore, progress
from stockpot.layout import EXCLUDED, FROZEN, INTEGER, STATISTIC, Layout
from stockpot.pool import Pool
from stockpot.soup.mix import mix_statistic, mix_tensor
from stockpot.soup.weights import heaviest


def tensors(
    pool: Pool,
    layout: Layout,
    W: Tensor,
    *,
    statistics: Mapping[str, Tensor] | None = None,
    copy_statistics: bool = False,
    dtype: torch.dtype | None = None,
    free: bool = False,
    listen: Listener = ignore,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the soup under its name, in the pool's order and the ingredients' dtype.

    Not mixed are: frozen tensors (copied), excluded ones (the donor's), integers and booleans (the heaviest
    ingredient's), and running statistics (`statistics` if given, else the heaviest ingredient's or the average).
    """
    columns = W.T.tolist()  # (G, K)
    heavy = heaviest(W)
    overall = W.mean(dim=1).tolist()  # (K,)
    first_of = {name: names[0] for names in layout.tied for name in names}
    done: dict[str, Tensor] = {}
    total = sum(spec.nbytes for spec in pool.specs.values())
    written = 0
    for name, spec in pool.specs.items():
        target = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
        reason = layout.kept.get(name)
        first = first_of.get(name, name)
        if statistics is not None and name in statistics:
            value = statistics[name]
        elif reason in (FROZEN, EXCLUDED):
            value = pool.tensor(layout.donor, name)
        elif reason == INTEGER or (
            reason == STATISTIC and (copy_statistics or not spec.dtype.is_floating_point)
        ):
            value = pool.tensor(heavy, name)
        elif reason == STATISTIC:
            value = mix_statistic([pool.tensor(k, name) for k in range(len(pool))], overall)
        elif first in done:
            value = done[first].clone()  # tied: mixed once; cloned because files do not share storage
        else:
            weights = columns[layout.group_of[name]]
            value = mix_tensor([pool.tensor(k, name) for k in range(len(pool))], weights, free=free)
            if name in first_of:
                done[first] = value
        written += spec.nbytes
        progress(listen, "building the soup", written, total)
        yield name, value.to(target)
