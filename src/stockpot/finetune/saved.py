"""The state of an unfinished training run, in one safetensors file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stockpot import atomic
from stockpot.errors import RunError
from stockpot.finetune.weights import read_file, write_file

INTERVAL = 300.0  # seconds of work that a kill may cost


@dataclass(frozen=True)
class Saved:
    path: Path
    interval: float = INTERVAL

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        atomic.make_directory(self.path.parent)
        write_file(
            self.path, {k: v.cpu().contiguous() for k, v in tensors.items()}, {"values": json.dumps(values)}
        )

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self.path.is_file():
            return None
        try:
            tensors, metadata = read_file(self.path)
        except RunError:
            return None  # costs time, never the result: the trial starts again
        return tensors, json.loads(metadata["values"])

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
