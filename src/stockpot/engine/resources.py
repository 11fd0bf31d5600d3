"""What a piece of work may take and has taken: memory of the host and the device, and threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        self.host, self.device = self.so_far()

    def so_far(self) -> tuple[int, int]:
        """Bytes of host and device at most, until now."""
        device = 0 if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)
        return max(self.host, anonymous_bytes()), device

    def _watch(self) -> None:
        while not self._done.wait(self._interval):
            self.host = max(self.host, anonymous_bytes())


def free_memory(device: torch.device) -> int | None:
    """Bytes a CUDA device can still give, what PyTorch holds unused included. None elsewhere."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def host_memory() -> int | None:
    """Bytes that this process may take in all: the machine's, or less where its container is limited. None: unknown."""
    try:
        machine: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        machine = None
    known = [limit for limit in (machine, *container_limits()) if limit is not None]
    return min(known, default=None)


def container_limits(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Memory limits of this process's control groups (version 2 or 1), its own and those it lies in."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if controllers in ("", "name=systemd"):
            base, file = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = base / place.strip("/")
        for folder in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # "max" is no limit
                found.append(int((folder / file).read_text()))
            if folder == base:
                break
    return [limit for limit in found if limit < 1 << 60]  # version 1 writes a huge number for none


SMALL = 300_000  # parameters; below, an operation is over before a second thread has woken up


@contextmanager
def threads_for(parameters: int, device: torch.device) -> Iterator[None]:
    """One thread for a small model: on a busy machine the threads of tiny operations mostly wait for each other.

    The rule is fixed, so that the numbers do not depend on what else the machine does.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" and parameters < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
