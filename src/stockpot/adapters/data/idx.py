"""idx files, the format of MNIST and its family, plain or gzipped."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.adapters.data.columns import Table, not_there
from stockpot.errors import DataError, describe
from stockpot.small_files import read_bytes

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST = 2**36  # bytes
_INFLATION = 100  # times its size that a gzipped file may unfold to
_PREFIXES = {"test": ("test", "t10k"), "train": ("train",)}


def read(path: Path, part: str | None) -> Table:
    part = part or "train"
    if not path.is_dir():
        raise not_there(str(path), "a folder of idx files")
    images, labels = _find(path, part, "images"), _find(path, part, "labels")
    return Table(f"{path} ({part})", {"image": read_idx(images), "label": read_idx(labels).astype(np.int64)})


def _find(path: Path, part: str, what: str) -> Path:
    wanted = [
        file
        for file in sorted(path.iterdir())
        if file.name.removesuffix(".gz").endswith(("-ubyte", ".idx", "idx1", "idx3", ".ubyte"))
        and what in file.name
        and any(prefix in file.name for prefix in _PREFIXES.get(part, (part,)))
    ]
    if len({file.name.removesuffix(".gz") for file in wanted}) != 1:
        known = [f.name for f in sorted(path.iterdir()) if "idx" in f.name or "ubyte" in f.name]
        prefix, rank = _PREFIXES.get(part, (part,))[-1], 3 if what == "images" else 1
        raise DataError(
            describe(
                str(path),
                expected=f"one file such as {prefix}-{what}-idx{rank}-ubyte",
                found=", ".join(known) if known else "no idx files",
                fix="parts are called train and test; keep one dataset per folder",
            )
        )
    return wanted[0]


def _unfolded(packed: bytes) -> bytes:
    """Zeros shrink a thousandfold: a small file may hold more than the machine. Images do not."""
    most = max(_INFLATION * len(packed), 2**26)
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
        raw = stream.read(most + 1)
    if len(raw) > most:
        raise ValueError(f"more than {most:,} bytes in a file of {len(packed):,}")
    return raw


def read_idx(file: Path) -> np.ndarray[Any, Any]:
    """The header says type and shape; the length must agree with it."""
    try:
        raw = read_bytes(file, _MOST)
        if file.suffix == ".gz":
            raw = _unfolded(raw)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            describe(str(file), expected="an idx file", found=str(error), fix="download it again")
        ) from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES or len(raw) < 4 + 4 * raw[3]:
        raise DataError(
            describe(
                str(file),
                expected="an idx file, which starts with two zero bytes, a type and a rank",
                found=f"bytes {raw[:4].hex(' ')}" if raw else "an empty file",
                fix="download it again",
            )
        )
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=raw[3], offset=4))
    dtype = np.dtype(_TYPES[raw[2]])
    body = raw[4 + 4 * raw[3] :]
    if len(body) != math.prod(shape) * dtype.itemsize:
        raise DataError(
            describe(
                str(file),
                expected=f"{math.prod(shape) * dtype.itemsize:,} bytes for shape {shape}",
                found=f"{len(body):,}",
                fix="the file is cut off or damaged; download it again",
            )
        )
    return np.frombuffer(body, dtype).reshape(shape).astype(dtype.newbyteorder("="))
