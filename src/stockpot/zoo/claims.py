"""Who works on what in a folder that several processes share, on one host or on several.

A claim is a lock of the kernel and a small file, `.NAME.claim`: host, its boot, process and a count. The lock dies with
its process; whether other hosts see it depends on the file system, and nothing tells. The file is seen by all: it is
created exclusively, and its count goes up every BEAT seconds. Who has the lock and finds a file there takes it over: at
once where it is of this host, whose locks can be trusted; else when it has said nothing new for SILENT seconds, by the
finder's own clock.

Where a host was only slow, two processes then do the same: that costs time, never the result.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from stockpot import files
from stockpot.errors import RunError
from stockpot.folders import Folder, opened, temporary_name

BEAT = 10.0  # seconds
# A network file system shows changes late by up to a minute, and a busy one hangs for as long.
SILENT = 120.0
_LIMIT = 4096  # bytes of a claim


def here() -> str:
    """This host since it was started: locks and process numbers of an earlier one mean nothing now."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "-"  # known on Linux only
    return f"{socket.gethostname()} {boot}"


class Claims:
    """All claims below one folder, as this process sees them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._heard: dict[Path, tuple[bytes, float]] = {}  # what others said last, and when that was new

    @contextlib.contextmanager
    def held(self, folder: Path, name: str = "") -> Iterator[bool]:
        """Whether it is ours for the block; not while another process has it."""
        lock = _lock(folder, name, self._root)
        path = folder / f"{name and '.'}{name}.claim"
        try:
            handle = self._created(path, name) if lock.try_acquire() else None
            if handle is None:
                yield False
                return
            over = threading.Event()
            beating = threading.Thread(target=_beat, args=(handle, over), name="stockpot-claim", daemon=True)
            try:
                beating.start()
                yield True
            finally:
                over.set()
                with contextlib.suppress(RuntimeError):  # interrupted before it began: then it says nothing any more
                    beating.join()
                self._give_back(path, handle)
        finally:
            lock.release()

    def _created(self, path: Path, name: str) -> int | None:
        """The new file, ours alone; None where somebody has one who may be at work."""
        with files.writing(path), opened(path.parent, self._root) as folder:
            try:
                return _new(folder, path.name)
            except FileExistsError:
                pass
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                said = self._said(path)
                if self._is_over(path, name, said):
                    aside = temporary_name(path.name)  # of several who find that, one can rename it
                    folder.rename(path.name, aside)
                    if self._said(path.with_name(aside)) == said:
                        folder.remove(aside)
                        return _new(folder, path.name)
                    folder.rename(aside, path.name)  # another one was faster, and this is its claim
        return None

    def _said(self, path: Path) -> bytes:
        try:
            return files.read_bytes(path, _LIMIT, self._root)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            expected, fix = "who works on a trial, in a line", "remove it, if nobody does"
            raise RunError.of(str(path), expected=expected, found=str(error), fix=fix) from error

    def _give_back(self, path: Path, handle: int) -> None:
        """Close and remove the file, if it is ours still: another host may have missed us, and has one of its own."""
        ours = os.fstat(handle)
        os.close(handle)
        with contextlib.suppress(OSError), opened(path.parent, self._root) as folder:  # the folder itself may be gone
            there = folder.status(path.name)
            if there is not None and os.path.samestat(there, ours):
                folder.remove(path.name)

    def _is_over(self, path: Path, name: str, said: bytes) -> bool:
        if said.startswith(f"{here()} ".encode()):
            again = _lock(path.parent, name, self._root)
            if not again.try_acquire():  # locks work on this host, so nobody else here had this one
                return True
            again.release()
        now = time.monotonic()
        before, since = self._heard.get(path, (None, now))
        if said != before:
            self._heard[path] = said, now
            return False
        return now - since >= SILENT


def _lock(folder: Path, name: str, root: Path) -> files.Lock:
    return files.Lock(folder, f"{name and '.'}{name}{files.LOCK}", root)


def _new(folder: Folder, name: str) -> int:
    handle = folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        _say(handle, 0)
    except OSError:
        os.close(handle)
        folder.remove(name)
        raise
    return handle


def _say(handle: int, count: int) -> None:
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, f"{here()} {os.getpid()} {count}\n".encode())
    os.fsync(handle)


def _beat(handle: int, over: threading.Event) -> None:
    count = 0
    while not over.wait(BEAT):
        count += 1
        with contextlib.suppress(OSError):  # a full disk or a lost server: at worst another host does the same work
            _say(handle, count)
