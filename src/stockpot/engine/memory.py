"""Peak memory of a piece of work: on the device, and on the host without file-backed pages."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

import torch

_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Resident memory that is not backed by a file; memory-mapped checkpoints do not count. 0 where unknown."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class PeakMemory:
    """Sample while a block of work runs. `host` counts everything the process holds, not only what was added."""

    def __init__(self, device: torch.device, interval: float = 0.02) -> None:
        self.host = 0
        self.device = 0
        self._cuda = device if device.type == "cuda" else None
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.host = anonymous_bytes()
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.host = max(self.host, anonymous_bytes())
        if self._cuda is not None:
            self.device = torch.cuda.max_memory_allocated(self._cuda)

    def _watch(self) -> None:
        while not self._done.wait(self._interval):
            self.host = max(self.host, anonymous_bytes())
