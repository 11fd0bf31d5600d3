"""Writes that happen whole or not at all.

Everything is written to a temporary sibling, flushed to the disk, and renamed into place; a killed process leaves
either the old content or the new one, plus at most a stray temporary name that the next write removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stockpot.errors import SoupError, describe

_TEMPORARY = ".{name}.writing"
_REPLACED = ".{name}.replaced"


def write_bytes(path: Path, data: bytes) -> None:
    temporary = path.with_name(_TEMPORARY.format(name=path.name))
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(_TEMPORARY.format(name=path.name))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        _sync(temporary)
        _swap(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(path.parent)


def _recover(path: Path) -> None:
    # A process killed between the two renames of `_swap` left the old content under its other name.
    old = path.with_name(_REPLACED.format(name=path.name))
    if old.is_dir() and not path.exists():
        old.rename(path)


def _swap(new: Path, path: Path) -> None:
    # A directory cannot be renamed over a full one, so the old one steps aside first; it is put back if the
    # second rename fails, and removed only after the new one stands.
    old = path.with_name(_REPLACED.format(name=path.name))
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
    shutil.rmtree(old, ignore_errors=True)


def sync_directory(path: Path) -> None:
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
