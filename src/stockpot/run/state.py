"""What a run keeps while it is under way: events.jsonl, and the state of the method that is not finished yet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, from_numpy

from stockpot import files, ranks
from stockpot.errors import RunError, StockpotError
from stockpot.events import Event
from stockpot.run.record import VALUES, as_array, as_values
from stockpot.run.shapes import ANY, COUNT, NUMBER, check, plain

STATE = "state.safetensors"
INTERVAL = 10.0  # seconds of work that a kill may cost
FLUSH_EVERY = 1.0  # seconds that a line may stay in this process
_SHAPE = {"seconds": NUMBER, "peak_host": COUNT, "peak_device": COUNT, "method": {"*": ANY}}


class DiskStore:
    """The disk's side of `stockpot.soups.problem.StateStore`.

    Tensors and values are in one file, so that they cannot disagree after a kill between two writes. The values are
    JSON in a tensor of bytes: a safetensors header is limited in size, and every reader parses it first.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.interval = INTERVAL
        self.peaks: Callable[[], tuple[int, int]] = lambda: (0, 0)  # bytes of host and device in this process
        self.earlier = (0.0, 0, 0)  # seconds and peaks of the processes that made the loaded state
        self._path, self._root = folder / STATE, root
        self._began = time.perf_counter()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        return ranks.on_first(self._read)

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not os.path.lexists(self._path):
            return None
        try:
            with safe_open(files.check_inside(self._root, self._path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            values = as_values(tensors.pop(VALUES).numpy())
            check(values, _SHAPE)
        except StockpotError:
            raise
        except Exception as error:
            expected = "the saved state of an unfinished method"
            found = f"{type(error).__name__}: {error}"
            fix = "delete that file; the method then starts from its beginning"
            raise RunError.of(str(self._path), expected=expected, found=found, fix=fix) from error
        self.earlier = values["seconds"], values["peak_host"], values["peak_device"]
        return tensors, values["method"]

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        if not ranks.first():
            return
        (seconds, *before), now = self.earlier, self.peaks()
        host, device = map(max, zip(before, now, strict=True))
        seconds += time.perf_counter() - self._began
        kept = {"seconds": seconds, "peak_host": host, "peak_device": device, "method": values}
        data = {**tensors, VALUES: from_numpy(as_array(kept).copy())}
        files.make_directory(self._path.parent, self._root)
        files.write_bytes(self._path, save({name: tensor.contiguous() for name, tensor in data.items()}), self._root)

    def clear(self) -> None:
        if ranks.first() and self._path.parent.is_dir():
            files.clear(self._path.parent, [STATE], self._root)


class Journal:
    """A listener that appends to events.jsonl. Progress is for drawing and is not kept; everything else is."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._file = files.open_for_append(path, root)  # drops a line that a kill has torn
        self._flushed = time.monotonic()

    def __call__(self, event: Event) -> None:
        if event.kind == "progress":
            return
        line = {"time": round(time.time(), 3), "kind": event.kind, **plain(event.data)}
        with files.writing(self._path):
            self._file.write(files.json_text(line) + "\n")
            if time.monotonic() - self._flushed > FLUSH_EVERY:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with files.writing(self._path):
            self._file.close()
