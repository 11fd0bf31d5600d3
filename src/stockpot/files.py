"""The one place that writes files, makes temporary names, locks and clears.

A write happens whole or not at all: everything goes to a temporary sibling, is flushed to the disk and renamed into
place; then the directory is flushed too, so that the new name outlives a power cut. A killed process leaves either the
old content or the new one, plus at most a stray temporary name, which `sweep` removes. (Windows cannot flush a
directory. There a process may be killed at any time; a power cut may cost the last rename.)

Nothing that a directory contains leads out of it. `root` is the directory that the user named (by default the one the
path is in): it may be reached through links, but no component below it may be one, for reading and for writing
(folders.py). Temporary names cannot be predicted and are created exclusively. FIFOs and devices are never read or
written: the first wait for ever and the others never end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from stockpot import folders, words
from stockpot.errors import LinkError, RunError, SoupError, WriteError
from stockpot.folders import check_entries as check_entries  # part of this interface
from stockpot.folders import check_inside as check_inside
from stockpot.folders import opened, temporary_name

LIMIT = 64 * 2**20  # bytes of a small file; ours have kilobytes, the largest index of shards a few megabytes
LINES_LIMIT = 2**30  # bytes of a file that lines are appended to
MARGIN = 16 * 2**20  # bytes beyond a forecast: directories, reports, lines about what happened
LOCK = ".lock"

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # opening a FIFO does not wait for its other end
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


# ---- writing


def write_bytes(path: Path, data: bytes, root: Path | None = None) -> None:
    temporary = temporary_name(path.name)
    with writing(path), opened(path.parent, root) as folder:
        try:
            handle = folder.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            folder.rename(temporary, path.name)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.remove(temporary)
            raise
        folder.sync()


def write_json(path: Path, value: Any, root: Path | None = None) -> None:
    write_bytes(path, (json_text(value, 2) + "\n").encode(), root)


def json_text(value: Any, indent: int | None = None) -> str:
    """As people read it; escaped where a name (of a file that is no UTF-8) holds what cannot be encoded."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value, indent=indent, allow_nan=False)
    return text


@contextlib.contextmanager
def file(path: Path, root: Path | None = None) -> Iterator[Path]:
    """Yield a place for a library to write one file to; it becomes `path` when the block ends without an error.

    The place is in a directory of its own, so that whatever else the library puts there goes away with it. No other
    process may be writing the same path.
    """
    with _prepared(path, root) as place:
        yield place / path.name
        _finish(place / path.name, place)
        with opened(path.parent, root) as folder:
            folder.rename(f"{place.name}/{path.name}", path.name)
            folder.sync()


@contextlib.contextmanager
def directory(path: Path, *, overwrite: bool = False, root: Path | None = None) -> Iterator[Path]:
    """Yield an empty temporary directory that becomes `path` when the block ends without an error.

    With `overwrite` it takes the place of what is there: of a link itself, never of what the link leads to. No other
    process may be writing the same path.
    """
    path = path.absolute()
    make_directory(path.parent, root)
    with _prepared(path, root) as place:
        if os.path.lexists(path) and not overwrite:
            fix = "choose another path, or replace it: --overwrite (in Python overwrite=True)"
            raise SoupError.of(str(path), expected="a new directory", found="something that already exists", fix=fix)
        yield place
        for entry in (*place.rglob("*"), place):
            _finish(entry, place)
        with opened(path.parent, root) as folder:
            folder.replace_directory(place.name, path.name)


@contextlib.contextmanager
def _prepared(path: Path, root: Path | None) -> Iterator[Path]:
    """A new temporary directory beside `path`; whatever has its name in the end goes away."""
    with writing(path):
        with opened(path.parent, root) as folder:
            folder.sweep(path.name)
            temporary = folder.make(temporary_name(path.name))
        try:
            yield path.parent / temporary
        finally:
            with contextlib.suppress(OSError), opened(path.parent, root) as folder:
                folder.remove(temporary)


def make_directory(path: Path, root: Path | None = None) -> None:
    """Make it and what it lies in, each flushed into its parent: files flushed into it later are not lost with it."""
    inside = root is not None and bool(folders.below(root, path))
    if path.is_dir() and not inside:
        return
    if path.parent != path:
        make_directory(path.parent, root if inside else None)
    with writing(path), opened(path.parent, root if inside else None) as folder:
        folder.make(path.name)
        folder.sync()


def open_for_append(path: Path, root: Path | None = None) -> TextIO:
    """A file of lines, opened to add some. What a killed process left of a last line is cut off first."""
    with writing(path), opened(path.parent, root) as folder:
        handle = folder.open(path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NONBLOCK)
        try:
            _require_own(handle, path)
            _cut_torn_line(handle, path)
            return os.fdopen(handle, "a", encoding="utf-8")
        except BaseException:
            os.close(handle)
            raise


def _cut_torn_line(handle: int, path: Path) -> None:
    size = end = os.fstat(handle).st_size
    if size > LINES_LIMIT:
        raise WriteError.of(str(path), f"a file of at most {LINES_LIMIT:,} bytes", f"{size:,} bytes", "remove it")
    while end:
        start = max(0, end - 2**20)
        os.lseek(handle, start, os.SEEK_SET)
        # A power cut may leave zeros where lines were on their way.
        block = os.read(handle, end - start).partition(b"\0")[0]
        end = start + block.rfind(b"\n") + 1
        if b"\n" in block:
            break
    if end != size:
        os.truncate(handle, end)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk or a missing permission in our words; errors about files elsewhere are left alone."""
    try:
        yield
    except OSError as error:
        place = path if error.filename is None else Path(os.fsdecode(error.filename))
        elsewhere = not place.absolute().is_relative_to(path.parent.absolute())
        if elsewhere or error.errno in (None, errno.EPIPE):
            raise
        raise _no_room(path, error.strerror or str(error), error.errno) from error
    except Exception as error:
        # safetensors has an error of its own; known by its name, so that this file needs no library.
        if type(error).__name__ == "SafetensorError" and "(os error " in str(error):
            raise _no_room(path, str(error)) from error
        raise


def _no_room(path: Path, found: str, number: int | None = None) -> WriteError:
    first = "make it writable" if number in (errno.EACCES, errno.EPERM, errno.EROFS) else "free some space"
    fix = f"{first} or choose another place; what was there before is unchanged"
    return WriteError.of(str(path), expected="room and permission to write", found=found, fix=fix)


def _finish(path: Path, folder: Path) -> None:
    """What a library made in our temporary folder: flushed, and as readable as any other file of the user."""
    if path.is_symlink():
        raise LinkError(f"{path} is a symbolic link, which a library made instead of a file")
    if path.is_dir():
        sync_directory(path)
    else:
        path.chmod(folder.stat().st_mode & 0o666)
        flush(path)


def flush(path: Path) -> None:
    """The content of a file, to the disk."""
    with os.fdopen(os.open(path, os.O_RDWR), "rb") as content:  # Windows flushes only what is writable
        os.fsync(content.fileno())


def sync_directory(path: Path) -> None:
    """Flush the names in a directory."""
    with opened(path, None) as folder:
        folder.sync()


# ---- reading


def read_bytes(path: Path, limit: int = LIMIT, root: Path | None = None, *, follow: bool = False) -> bytes:
    """The content of a regular file. Raises OSError or ValueError and nothing else.

    `follow` is for what the user has named or collected (a recipe, the files of a pool), which may be links.
    """
    flags = os.O_RDONLY | _NONBLOCK
    if follow:
        handle = os.open(path, flags)
    else:
        with opened(path.parent, root) as folder:
            handle = folder.open(path.name, flags)
    with os.fdopen(handle, "rb") as content:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if status.st_size > limit:
            raise ValueError(f"{status.st_size:,} bytes, more than such a file has")
        return content.read(status.st_size)


def read_text(path: Path, limit: int = LIMIT, root: Path | None = None, *, follow: bool = False) -> str:
    return read_bytes(path, limit, root, follow=follow).decode("utf-8")


def read_json(path: Path, limit: int = LIMIT, root: Path | None = None, *, follow: bool = False) -> Any:
    return parse_json(read_bytes(path, limit, root, follow=follow))


def read_table(path: Path) -> dict[str, Any]:
    """A table of JSON, which may be a link; an empty one where none can be read."""
    try:
        value = read_json(path, follow=True)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def parse_json(content: bytes | str) -> Any:
    """Plain values. Raises ValueError and nothing else.

    JSON that says a key twice is refused: every reader would be free to believe another of the two.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"text that is not UTF-8, from byte {error.start}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {key[:80]!r} appears twice")
    return found


# ---- removing


def sweep(path: Path, root: Path | None = None) -> None:
    """Remove what killed processes left half-written in a directory, which nobody else may be writing to."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), opened(path, root) as folder:
        folder.sweep()


def clear(folder: Path, names: Iterable[str], root: Path | None = None) -> None:
    """Remove these entries of a directory, where they are; of a link the link itself."""
    with writing(folder / LOCK), opened(folder, root) as place:
        for name in names:
            place.remove(name)
        place.sync()


# ---- asking a directory


def at_home(path: str | Path) -> Path:
    """With `~` as the user's home. The home of somebody who is not known here stays as it is, and nothing is there."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (which raises)


class Lock:
    """One process per directory. The lock is the kernel's, so it dies with the process that holds it.

    It is our own because the library `filelock` truncates the file before it has the lock, does not look whether it
    is a regular one of ours, and cannot say who holds it.
    """

    def __init__(self, folder: Path, name: str = LOCK, root: Path | None = None) -> None:
        self._path = folder / name
        self._root = root
        self._handle: int | None = None

    def acquire(self) -> None:
        """Ours alone, or an error that says whose it is."""
        holder = self._take()
        if holder is not None:
            found = f"one in use by process {holder}" if holder else "one in use by another process"
            fix = "wait until that one has finished, or choose another directory"
            raise RunError.of(str(self._path.parent), "a directory that no other process works in", found, fix)

    def try_acquire(self) -> bool:
        return self._take() is None

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _take(self) -> str | None:
        """None when the lock is ours now; otherwise the process that holds it, as far as it is known."""
        with writing(self._path), opened(self._path.parent, self._root) as folder:
            while True:
                handle = folder.open(self._path.name, os.O_RDWR | os.O_CREAT | _NONBLOCK)
                try:
                    _require_own(handle, self._path)
                    if not _lock(handle):
                        return os.read(handle, 32).decode(errors="replace").strip()
                    status = folder.status(self._path.name)
                    if status is not None and os.path.samestat(status, os.fstat(handle)):
                        os.truncate(handle, 0)
                        os.write(handle, f"{os.getpid()}\n".encode())
                        self._handle = handle
                        return None
                    # Whoever held it before has removed the file: a lock on it would be nobody's.
                finally:
                    if self._handle != handle:
                        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        import fcntl
    except ImportError:  # no such locks on Windows; two processes there are the user's own care
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _BUSY  # some file systems have no locks at all
    return True


def _require_own(handle: int, path: Path) -> None:
    """A file that is changed in place must be a regular one, and without a second name outside of the directory."""
    status = os.fstat(handle)
    regular = stat.S_ISREG(status.st_mode)
    if not regular or status.st_nlink > 1:
        found = "one with a second name elsewhere (a hard link)" if regular else "something else"
        fix = "put a copy in its place, or choose another directory"
        raise WriteError.of(str(path), expected="a regular file of its own", found=found, fix=fix)


def require_space(path: Path, nbytes: int, what: str) -> None:
    """Raise when `nbytes` and a margin do not fit where `path` is, or will be: before hours of work, not after."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return  # cannot be known; the writes themselves will say
    if free < nbytes + MARGIN:
        expected = f"{words.size(nbytes + MARGIN)} of free space for {what}"
        fix = "free some space or choose another place; nothing was changed"
        raise WriteError.of(str(path), expected=expected, found=words.size(free) if free else "none", fix=fix)
