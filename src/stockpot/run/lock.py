"""One process per run directory. The lock is the kernel's, so it dies with the process that holds it."""

from __future__ import annotations

import os
from pathlib import Path

from stockpot.errors import RunError, describe

LOCK = ".lock"


class Lock:
    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._handle: int | None = None

    def acquire(self) -> None:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _lock(handle):
            holder = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise RunError(
                describe(
                    str(self._path.parent),
                    expected="a run directory that no other process uses",
                    found=f"one in use by process {holder}" if holder else "one in use by another process",
                    fix="wait until that one has finished, or choose another output directory",
                )
            )
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._handle = handle

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _lock(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # no such locks on Windows; two processes there are the user's own care
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
