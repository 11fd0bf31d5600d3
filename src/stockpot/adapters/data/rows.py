"""Samples named one by one in a file: a published split, repeated exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.adapters.data.columns import Table, not_there
from stockpot.errors import DataError, describe

_SHOWN = 3
_FIX = (
    "list samples of this part: numbers from 0, a mask of 0 and 1 with one entry per sample, or image paths"
)


def read_rows(file: Path, table: Table) -> np.ndarray[Any, Any]:
    """Sorted row numbers of `table`, from a `.npy` array or from a text file with one sample per line."""
    if not file.is_file():
        raise not_there(str(file), "a .npy array or a text file that lists samples")
    try:
        given = np.load(file, allow_pickle=False) if file.suffix == ".npy" else _lines(file)
    except (OSError, ValueError) as error:
        raise _wrong(file, "a .npy array of numbers or a text file", str(error)) from error
    rows = _numbers(file, given, len(table)) if isinstance(given, np.ndarray) else _named(file, given, table)
    if len(rows) == 0:
        raise _wrong(file, "at least one sample", "none")
    if len(np.unique(rows)) < len(rows):
        raise _wrong(file, "every sample once", f"{len(rows) - len(np.unique(rows))} listed again")
    return np.sort(rows)


def _lines(file: Path) -> np.ndarray[Any, Any] | list[str]:
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if all(line.isdecimal() for line in lines):
        return np.array([int(line) for line in lines], dtype=np.int64)
    return lines


def _numbers(file: Path, given: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    if given.ndim != 1 or given.dtype.kind not in "biuf" or not np.array_equal(given, np.floor(given)):
        raise _wrong(file, "one whole number per sample", f"{given.dtype} values of shape {given.shape}")
    # Row numbers are all different, so that zeros and ones as many as samples can only be a mask.
    if given.dtype.kind == "b" or (len(given) == size and bool(np.isin(given, (0, 1)).all())):
        if len(given) != size:
            raise _wrong(file, f"a mask of {size:,} entries, one per sample", f"{len(given):,}")
        return np.flatnonzero(given)
    rows = given.astype(np.int64)
    if len(rows) and (rows.min() < 0 or rows.max() >= size):
        raise _wrong(file, f"numbers from 0 to {size - 1:,}", f"{rows.min():,} to {rows.max():,}")
    return rows


def _named(file: Path, names: Sequence[str], table: Table) -> np.ndarray[Any, Any]:
    images = table.columns.get("image")
    if not isinstance(images, list) or not all(isinstance(image, (str, Path)) for image in images):
        raise _wrong(file, "numbers of samples: this part has no image files to name", repr(names[0]))
    base = f"{table.where}/"
    number = {str(image).removeprefix(base): row for row, image in enumerate(images)}
    gone = [name for name in names if name not in number]
    if gone:
        more = f" and {len(gone) - _SHOWN:,} more" if len(gone) > _SHOWN else ""
        found = f"{', '.join(gone[:_SHOWN])}{more}, which are not there"
        raise _wrong(file, f"images of {table.where}, such as {next(iter(number))}", found)
    return np.array([number[name] for name in names], dtype=np.int64)


def _wrong(file: Path, expected: str, found: str) -> DataError:
    return DataError(describe(str(file), expected=expected, found=found, fix=_FIX))
