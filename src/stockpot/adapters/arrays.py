"""numpy and safetensors arrays: one file with several arrays, or a folder of `.npy` files."""

from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stockpot.adapters.tables import LIMITS, Column, Limits, Table, as_text, bad_data, first_line, not_there
from stockpot.errors import DataError
from stockpot.pool import open_checkpoint

_FILES = (".npz", ".safetensors")
_KINDS = "a .npz or .safetensors file, or a folder of .npy files"


def read_arrays(path: Path, part: str | None, limits: Limits = LIMITS) -> Table:
    if part is not None and path.is_dir():
        for place in (path / part, *(path / f"{part}{suffix}" for suffix in _FILES)):
            if place.exists():
                return Table(str(place), _load(place, limits))
        known = _known(path)
        if len(known) > 1 and not any(path.glob("*.npy")):
            found, fix = ", ".join(file.name for file in known), "name one of them as the split, such as fit: val"
            raise bad_data(f"part {part!r} of {path}", f"a file such as {part}.npz", found, fix)
    columns = _load(path, limits)
    if part is None:
        return Table(str(path), columns)
    # `x_test` and `test_x` are column x of part test.
    ends = {name.removesuffix(f"_{part}"): column for name, column in columns.items() if name.endswith(f"_{part}")}
    starts = {name.removeprefix(f"{part}_"): column for name, column in columns.items() if name.startswith(f"{part}_")}
    if not ends and not starts:
        expected = f"a file of that name, or arrays such as x_{part} and y_{part}"
        fix = "name a part that is there, or use fractions"
        raise bad_data(f"part {part!r} of {path}", expected, f"arrays {', '.join(columns)}", fix)
    return Table(str(path), {**starts, **ends})


def _known(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in _FILES)


def _load(path: Path, limits: Limits) -> dict[str, Column]:
    files = [path]
    if path.is_dir():
        known = _known(path)
        files = sorted(path.glob("*.npy")) or known
        if files == known and len(known) != 1:
            fix = "name one of them as the split, such as fit: val.npz"
            found = ", ".join(file.name for file in known) or "none of them"
            raise bad_data(path, "one .npz or .safetensors file, or .npy files", found, fix)
    elif not path.is_file():
        raise not_there(path, _KINDS)
    elif path.suffix not in _FILES:
        fix = "save inputs and labels together with numpy.savez(path, x=..., y=...)"
        raise bad_data(path, _KINDS, path.suffix or "no ending", fix)
    arrays: dict[str, Any] = {}
    for file in files:
        try:
            arrays |= _arrays(file, limits)
        except DataError:
            raise
        except Exception as error:  # a damaged archive can raise almost anything
            raise _unreadable(file, first_line(error)) from error
    return {name: _column(path, name, array, limits) for name, array in arrays.items()}


def _arrays(file: Path, limits: Limits) -> dict[str, Any]:
    if not file.is_file():
        raise OSError("not a regular file")
    if file.suffix == ".npy":
        with file.open("rb") as stream:
            return {file.stem: np.lib.format.read_array(stream, allow_pickle=False)}
    if file.suffix == ".npz":
        with zipfile.ZipFile(file) as archive:
            limits.check_unfolded(file, sum(record.file_size for record in archive.infolist()))
            names = Counter(name.removesuffix(".npy") for name in archive.namelist())
        if twice := [name for name, times in names.items() if times > 1]:
            raise bad_data(file, "every array once", f"{', '.join(twice)} twice", "leave one of them out")
        with np.load(file, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    opened, halves = open_checkpoint(file), (torch.bfloat16, torch.float16)
    tensors = {name: opened.tensor(name) for name in opened.specs}
    return {name: (t.float() if t.dtype in halves else t).numpy() for name, t in tensors.items()}


def _column(path: Path, name: str, array: Any, limits: Limits) -> Column:
    where, fix = f"{path}, {name}", "leave it out of the file"
    if not isinstance(array, np.ndarray):  # numpy hands out as bytes what is no array
        raise _unreadable(path, f"{name}, which is no array")
    if array.ndim == 0:
        raise bad_data(where, "an array with one entry per sample", "a single value", fix)
    if len(array) and array.nbytes == 0:  # any number of rows in a file of any size
        found = f"{len(array):,} rows of nothing ({array.dtype}, shape {array.shape})"
        raise bad_data(where, "an array that holds something", found, fix)
    limits.check_rows(where, len(array))
    if array.dtype.kind in "US" and array.ndim == 1:
        return [as_text(value, f"{where}, row {row}") for row, value in enumerate(array.tolist())]
    return array


def _unreadable(path: Path, found: str) -> DataError:
    if "pickle" in found.lower():
        found = "Python objects, which are not read because they can run code"
    return bad_data(path, "plain arrays", found, "save numbers or text only")
