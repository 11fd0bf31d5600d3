"""Decoded images in a file: more than memory holds, decoded once for all commands that need them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.atomic import sync_directory
from stockpot.errors import DataError, describe

Fill = Callable[[np.ndarray[Any, Any]], None]


def digest(items: Iterable[Any], folder: Path, how: str) -> str:
    """Of what the pixels depend on. Files count by name, size and time, so that reading them is not necessary."""
    total = hashlib.sha256(how.encode())
    for item in items:
        source: Any = item.get("bytes") or item.get("path") if isinstance(item, dict) else item
        if isinstance(source, np.ndarray):
            total.update(str(source.shape).encode() + np.ascontiguousarray(source).tobytes())
        elif isinstance(source, bytes):
            total.update(len(source).to_bytes(8, "little") + source)
        else:
            facts = os.stat(folder / source)  # noqa: PTH116  (the fastest, for millions of files)
            total.update(f"{source}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return total.hexdigest()


def kept(cache: Path, name: str, shape: tuple[int, ...], fill: Fill) -> Tensor:
    """The uint8 images of an earlier command, or those `fill` makes; mapped from their file, not held in memory."""
    file = cache / f"{name}.u8"
    needed = int(np.prod(shape))
    if not file.is_file() or file.stat().st_size != needed:
        _make(file, needed, shape, fill)
    # Private: nothing that is done to the tensor reaches the file.
    return torch.from_file(str(file), shared=False, size=needed, dtype=torch.uint8).view(shape)


def _make(file: Path, needed: int, shape: tuple[int, ...], fill: Fill) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(file.parent).free
    except OSError as error:
        raise _no_place(file.parent, "a folder to write to", error.strerror or str(error)) from error
    if free < needed:
        raise _no_place(file.parent, f"{needed:,} bytes for decoded images", f"{free:,} bytes free")
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".writing", dir=file.parent)
    try:
        _reserve(handle, needed, file.parent)
        images = np.memmap(temporary, np.uint8, "r+", shape=shape)
        fill(images)
        images.flush()  # msync: on the disk before it gets its name
        del images
        Path(temporary).replace(file)
        sync_directory(file.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _reserve(handle: int, needed: int, folder: Path) -> None:
    """Room for the whole file: a disk that is full when a page of a mapping is written ends the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, needed)
        else:
            os.truncate(handle, needed)
    except OSError as error:
        raise _no_place(
            folder, f"{needed:,} bytes for decoded images", error.strerror or str(error)
        ) from error
    finally:
        os.close(handle)


def _no_place(folder: Path, expected: str, found: str) -> DataError:
    return DataError(
        describe(
            f"data.cache {folder}", expected=expected, found=found, fix="name another folder in data.cache"
        )
    )
