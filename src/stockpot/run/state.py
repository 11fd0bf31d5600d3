"""Where a method's unfinished work lies: the disk's side of `stockpot.soups.StateStore`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from stockpot import atomic
from stockpot.errors import RunError, describe

STATE = "state.safetensors"
INTERVAL = 10.0  # seconds of work a kill may cost


class DiskStore:
    """Tensors and values in one file, so that they cannot disagree after a kill between two writes."""

    def __init__(self, folder: Path, interval: float = INTERVAL) -> None:
        self.interval = interval
        self.earlier = 0.0  # seconds of work that earlier processes put into the loaded state
        self._path = folder / STATE
        self._began = time.perf_counter()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
                kept = file.metadata()
            self.earlier = float(kept["seconds"])
            return tensors, json.loads(kept["values"])
        except Exception as error:
            raise RunError(
                describe(
                    str(self._path),
                    expected="the saved state of an unfinished method",
                    found=f"{type(error).__name__}: {error}",
                    fix="delete that file; the method then starts from its beginning",
                )
            ) from error

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        kept = {"values": json.dumps(values), "seconds": repr(self.seconds)}
        atomic.make_directory(self._path.parent)
        atomic.write_bytes(self._path, save({k: v.contiguous() for k, v in tensors.items()}, metadata=kept))

    @property
    def seconds(self) -> float:
        return self.earlier + time.perf_counter() - self._began

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)
