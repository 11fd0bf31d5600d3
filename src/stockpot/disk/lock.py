"""One process per directory. The lock is the kernel's, so it dies with the process that holds it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from stockpot.atomic import writing
from stockpot.errors import RunError, describe

LOCK = ".lock"
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


class Lock:
    def __init__(self, directory: Path, name: str = LOCK) -> None:
        self._path = directory / name
        self._handle: int | None = None

    def acquire(self) -> None:
        """Ours alone, or an error that says whose it is."""
        handle = self._open()
        if not _lock(handle):
            holder = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise RunError(
                describe(
                    str(self._path.parent),
                    expected="a directory that no other process works in",
                    found=f"one in use by process {holder}" if holder else "one in use by another process",
                    fix="wait until that one has finished, or choose another directory",
                )
            )
        try:
            with writing(self._path):
                os.truncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle

    def share(self) -> None:
        """Held together with others that share it."""
        self._handle = self._open()
        _lock(self._handle, shared=True, wait=True)

    def wait(self) -> None:
        """Until nobody shares it any more."""
        handle = self._open()
        try:
            _lock(handle, wait=True)
        finally:
            os.close(handle)

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int:
        with writing(self._path):
            return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)


def _lock(handle: int, *, shared: bool = False, wait: bool = False) -> bool:
    try:
        import fcntl
    except ImportError:  # no such locks on Windows; two processes there are the user's own care
        return True
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(handle, kind)
    except OSError as error:
        return error.errno not in _BUSY  # some file systems have no locks at all
    return True
