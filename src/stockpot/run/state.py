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
from stockpot.soup.contents import MAX_SHARD
from stockpot.soup.soup import Soup
from stockpot.soups.fold import Saved, merged

STATE = "state.safetensors"
_PART = "state-{}.safetensors"  # of the rank of that number, where ranks learn apart
INTERVAL = 10.0  # seconds of work that a kill may cost
FLUSH_EVERY = 1.0  # seconds that a line may stay in this process
_SHAPE = {"seconds": NUMBER, "peak_host": COUNT, "peak_device": COUNT, "method": {"*": ANY}}


class DiskStore:
    """The disk's side of `stockpot.soups.problem.StateStore`.

    Tensors and values are in one file, so that they cannot disagree after a kill between two writes. The values are
    JSON in a tensor of bytes: a safetensors header is limited in size, and every reader parses it first. Ranks that
    learn apart have a file each. Whoever goes on makes one of them first, so that none is left to grow old.
    """

    def __init__(self, folder: Path, root: Path, max_shard: int = MAX_SHARD) -> None:
        self.interval = INTERVAL
        self.peaks: Callable[[], tuple[int, int]] = lambda: (0, 0)  # bytes of host and device in this process
        self.earlier = (0.0, 0, 0)  # seconds and peaks of the processes that made the loaded state
        self._path, self._root = folder / STATE, root
        self._folder, self._max_shard = folder, max_shard
        self._began = time.perf_counter()

    def load(self) -> Saved | None:
        return ranks.on_first(self._read)

    def _parts(self) -> list[str]:
        """The files of ranks that learned apart."""
        there = self._folder.is_dir() and not self._folder.is_symlink()
        return sorted(path.name for path in self._folder.glob(_PART.format("*"))) if there else []

    def _read(self) -> Saved | None:
        paths = [self._path] if os.path.lexists(self._path) else []
        parts = self._parts()
        found = [self._read_one(path) for path in (*paths, *(self._folder / name for name in parts))]
        if not found:
            return None
        seconds, host, device = zip(*(spent for spent, _ in found), strict=True)
        self.earlier = max(seconds), max(host), max(device)
        if not parts:
            return found[0][1]
        try:
            whole = merged([saved for _, saved in found])
        except Exception as error:
            raise _damaged(self._folder / parts[0], error, f"delete {STATE} and its parts there") from error
        self._write(self._path, *whole, self.earlier)
        files.clear(self._folder, parts, self._root)
        return whole

    def _read_one(self, path: Path) -> tuple[tuple[float, int, int], Saved]:
        try:
            with safe_open(files.check_inside(self._root, path), framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            values = as_values(tensors.pop(VALUES).numpy())
            check(values, _SHAPE)
        except StockpotError:
            raise
        except Exception as error:
            raise _damaged(path, error, "delete that file") from error
        return (values["seconds"], values["peak_host"], values["peak_device"]), (tensors, values["method"])

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any], part: int | None = None) -> None:
        if part is None and not ranks.first():
            return
        (seconds, *before), now = self.earlier, self.peaks()
        host, device = map(max, zip(before, now, strict=True))
        seconds += time.perf_counter() - self._began
        path = self._path if part is None else self._folder / _PART.format(part)
        self._write(path, tensors, values, (seconds, host, device))

    def keep(self, soup: Soup) -> Path:
        """The soup can be built from its record, whatever becomes of the method."""
        if ranks.first():
            files.make_directory(self._folder, self._root)
            soup.write_record(self._folder, self._max_shard, root=self._root)
        return self._folder

    def _write(
        self, path: Path, tensors: dict[str, Tensor], values: dict[str, Any], spent: tuple[float, int, int]
    ) -> None:
        kept = {**dict(zip(("seconds", "peak_host", "peak_device"), spent, strict=True)), "method": values}
        data = {**tensors, VALUES: from_numpy(as_array(kept).copy())}
        files.make_directory(self._folder, self._root)
        files.write_bytes(path, save({name: tensor.contiguous() for name, tensor in data.items()}), self._root)

    def clear(self) -> None:
        if ranks.first() and self._folder.is_dir():
            files.clear(self._folder, [STATE, *self._parts()], self._root)


def _damaged(path: Path, error: Exception, fix: str) -> RunError:
    fix = f"{fix}; the method then starts from its beginning"
    return RunError.of(str(path), "the saved state of an unfinished method", f"{type(error).__name__}: {error}", fix)


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
