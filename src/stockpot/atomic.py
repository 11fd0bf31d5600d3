"""Writes that happen whole or not at all.

Everything is written to a temporary sibling, flushed to the disk, and renamed into place; then the directory is flushed
too, so that the new name outlives a power cut. A killed process leaves either the old content or the new one, plus at
most a stray temporary name, which the next write of the same path or `sweep` removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stockpot.errors import SoupError, WriteError, describe

_WRITING, _REPLACED = ".writing", ".replaced"
_TEMPORARY = f".{{name}}{_WRITING}"
_ASIDE = f".{{name}}{_REPLACED}"


def write_bytes(path: Path, data: bytes) -> None:
    temporary = path.with_name(_TEMPORARY.format(name=path.name))
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
    """Yield a place for a library to write one file to; it becomes `path` when the block ends without an error.

    The place is in a directory of its own, so that whatever else the library puts there goes away with it.
    """
    folder = path.with_name(_TEMPORARY.format(name=path.name))
    shutil.rmtree(folder, ignore_errors=True)
    with writing(path):
        folder.mkdir()
        try:
            yield folder / path.name
            (folder / path.name).chmod(_readable(folder))
            _sync(folder / path.name)
            (folder / path.name).replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        sync_directory(path.parent)


@contextlib.contextmanager
def directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty temporary directory that becomes `path` when the block ends without an error."""
    path = path.absolute()
    _recover(path)
    if path.exists() and not overwrite:
        raise SoupError(
            describe(
                str(path),
                expected="a new directory",
                found="something that already exists",
                fix="choose another path, or pass overwrite=True",
            )
        )
    temporary = path.with_name(_TEMPORARY.format(name=path.name))
    shutil.rmtree(temporary, ignore_errors=True)
    make_directory(path.parent)
    with writing(path):
        temporary.mkdir()
        try:
            yield temporary
            for entry in temporary.rglob("*"):
                if entry.is_file():
                    entry.chmod(_readable(temporary))
                _sync(entry)
            _sync(temporary)
            _swap(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Make it and what it lies in, each flushed into its parent: files flushed into it later are not lost with it."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    with writing(path):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sweep(path: Path) -> None:
    """Remove what killed processes left half-written in a directory, which nobody else may be writing to."""
    for entry in list(path.iterdir()) if path.is_dir() else []:
        if not entry.name.startswith("."):
            continue
        if entry.name.endswith(_REPLACED):
            _recover(entry.with_name(entry.name[1 : -len(_REPLACED)]))
        if entry.name.endswith((_WRITING, _REPLACED)) and entry.exists():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    entry.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk or a missing permission in our words; errors about files elsewhere are left alone."""
    try:
        yield
    except OSError as error:
        elsewhere = error.filename is not None and not _near(error.filename, path)
        if elsewhere or error.errno in (None, errno.EPIPE):
            raise
        raise _refusal(path, error.strerror or str(error), error.errno) from error
    except Exception as error:
        # safetensors has an error of its own; known by its name, so that this file needs no library.
        if type(error).__name__ == "SafetensorError" and "(os error " in str(error):
            raise _refusal(path, str(error), None) from error
        raise


def _near(filename: str | bytes, path: Path) -> bool:
    return Path(os.fsdecode(filename)).absolute().is_relative_to(path.parent.absolute())


def _refusal(path: Path, found: str, number: int | None) -> WriteError:
    denied = number in (errno.EACCES, errno.EPERM, errno.EROFS)
    first = "make it writable" if denied else "free some space"
    return WriteError(
        describe(
            str(path),
            expected="room and permission to write",
            found=found,
            fix=f"{first} or choose another place; what was there before is unchanged",
        )
    )


def _readable(folder: Path) -> int:
    # What a library makes may be private; files are to be as readable as any other of the user.
    return folder.stat().st_mode & 0o666


def _recover(path: Path) -> None:
    # A process killed between the two renames of `_swap` left the old content under its other name.
    old = path.with_name(_ASIDE.format(name=path.name))
    if old.is_dir() and not path.exists():
        old.rename(path)


def _swap(new: Path, path: Path) -> None:
    # A directory cannot be renamed over a full one. Where the system can exchange two names, the path is never without
    # content; elsewhere the old one steps aside first, is put back if the second rename fails, and removed only after
    # the new one stands.
    if path.is_dir() and not path.is_symlink() and _exchange(new, path):
        sync_directory(path.parent)
        shutil.rmtree(new, ignore_errors=True)
        return
    old = path.with_name(_ASIDE.format(name=path.name))
    shutil.rmtree(old, ignore_errors=True)
    if path.is_dir():
        path.rename(old)
    elif path.exists():
        path.unlink()
    try:
        new.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        raise
    sync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Give each the other's name in one step, or answer that this cannot be done here."""
    try:
        rename = ctypes.CDLL(None).renameat2  # Linux
    except (OSError, AttributeError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0)


def sync_directory(path: Path) -> None:
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
