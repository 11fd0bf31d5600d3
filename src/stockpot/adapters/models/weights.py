"""Starting weights from a local checkpoint, read as safely as a pool is."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from stockpot.errors import TaskError, describe
from stockpot.pool import open_checkpoint


def load_weights(model: nn.Module, path: Path) -> tuple[str, ...]:
    """Copy what fits; the names that stay as they were come back.

    Only one layer may stay: a head of another size. Anything more is the wrong file.
    """
    checkpoint = open_checkpoint(path)
    own = dict(model.state_dict())
    # A bare encoder's names lack the prefix of the wrapper it is used in here.
    prefixes = ("", *sorted({f"{name.partition('.')[0]}." for name in own}))
    prefix = max(prefixes, key=lambda p: sum(f"{p}{name}" in own for name in checkpoint.specs))
    given = {f"{prefix}{name}": name for name in checkpoint.specs}
    fits = {n for n in own if n in given and tuple(checkpoint.specs[given[n]].shape) == tuple(own[n].shape)}
    left = tuple(name for name in own if name not in fits)
    if not fits or len({name.rpartition(".")[0] for name in left}) > 1:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise TaskError(
            describe(
                f"weights {path}",
                expected="tensors for all of the model except a new head",
                found=f"none that fit {shown}",
                fix="give the checkpoint this architecture was pre-trained as",
            )
        )
    with torch.no_grad():
        for name in sorted(fits):
            own[name].copy_(checkpoint.tensor(given[name]))
    return left
