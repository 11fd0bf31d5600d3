"""A fingerprint of data, so that a run is not continued with other samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stockpot.task.data import Data

_PIECE = 1024  # samples hashed at a time


def fingerprint(data: Data) -> str:
    total = hashlib.sha256()
    for start in range(0, len(data), _PIECE):
        _add(total, data.batch(torch.arange(start, min(start + _PIECE, len(data)))))
    return total.hexdigest()


def _add(total: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        total.update(f"{value.dtype}{tuple(value.shape)}".encode())
        total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key in value:
            total.update(str(key).encode())
            _add(total, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(total, item)
    else:
        total.update(repr(value).encode())
