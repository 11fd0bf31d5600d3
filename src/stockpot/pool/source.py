"""What every format reader returns: names, specs, and a way to get one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from stockpot.pool.spec import TensorSpec


@dataclass(frozen=True)
class Source:
    """The tensors of one file, or of the shards of one directory, under the names that the file uses."""

    format: str
    files: tuple[Path, ...]
    specs: Mapping[str, TensorSpec]
    read: Callable[[str], Tensor]
    aliases: tuple[tuple[str, ...], ...] = ()
    key: str | None = None
    other_keys: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
