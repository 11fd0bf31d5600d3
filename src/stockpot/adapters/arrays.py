"""numpy and safetensors arrays: one file with several arrays, or a folder of `.npy` files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.adapters.tables import LIMITS, Column, Limits, Table, as_text, bad_data, first_line, not_there
from stockpot.errors import CheckpointError, DataError

_FILES = (".npz", ".safetensors")
_KINDS = "a .npz or .safetensors file, or a folder of .npy files"


def read_arrays(path: Path, part: str | None, limits: Limits = LIMITS) -> Table:
    if part is not None and path.is_dir():
        for place in (path / part, *(path / f"{part}{suffix}" for suffix in _FILES)):
            if place.exists():
                return Table(str(place), _load(place, limits))
        if len(known := _files(path)) > 1 and not any(path.glob("*.npy")):
            raise bad_data(
                f"part {part!r} of {path}",
                f"a file such as {part}.npz",
                ", ".join(known),
                "name one of them as the split, such as fit: val",
            )
    columns = _load(path, limits)
    return Table(str(path), columns if part is None else _named(columns, part, path))


def _named(columns: dict[str, Column], part: str, path: Path) -> dict[str, Column]:
    """`x_test` and `test_x` are column x of part test."""
    chosen: dict[str, Column] = {}
    for name, column in columns.items():
        if name.endswith(f"_{part}"):
            chosen[name[: -len(part) - 1]] = column
        elif name.startswith(f"{part}_"):
            chosen[name[len(part) + 1 :]] = column
    if not chosen:
        raise bad_data(
            f"part {part!r} of {path}",
            f"a file of that name, or arrays such as x_{part} and y_{part}",
            f"arrays {', '.join(columns)}",
            "name a part that is there, or use fractions",
        )
    return chosen


def _files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.suffix in _FILES)


def _load(path: Path, limits: Limits) -> dict[str, Column]:
    if path.is_dir():
        if files := sorted(path.glob("*.npy")):
            return {file.stem: _checked(file, file.stem, _npy(file), limits) for file in files}
        known = _files(path)
        if len(known) == 1:
            return _load(path / known[0], limits)
        fix = "name one of them as the split, such as fit: val.npz"
        found = ", ".join(known) or "none of them"
        raise bad_data(str(path), "one .npz or .safetensors file, or .npy files", found, fix)
    if not path.is_file():
        raise not_there(path, _KINDS)
    if path.suffix not in _FILES:
        fix = "save inputs and labels together with numpy.savez(path, x=..., y=...)"
        raise bad_data(str(path), _KINDS, path.suffix or "no ending", fix)
    try:
        arrays = _safetensors(path) if path.suffix == ".safetensors" else _npz(path, limits)
    except DataError:
        raise
    except Exception as error:  # a damaged archive can raise almost anything
        raise _unreadable(path, error) from error
    return {name: _checked(path, name, array, limits) for name, array in arrays.items()}


def _npy(path: Path) -> Any:
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:
        raise _unreadable(path, error) from error


def _npz(path: Path, limits: Limits) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        limits.check_unfolded(path, sum(record.file_size for record in archive.infolist()))
    with np.load(path, allow_pickle=False) as content:
        return {name: content[name] for name in content.files}


def _safetensors(path: Path) -> dict[str, Any]:
    import torch

    from stockpot.pool import open_checkpoint

    try:
        file = open_checkpoint(path)
        tensors = {name: file.tensor(name) for name in file.specs}
    except CheckpointError as error:
        raise _unreadable(path, error) from error
    halves = (torch.bfloat16, torch.float16)
    return {name: (t.float() if t.dtype in halves else t).numpy() for name, t in tensors.items()}


def _checked(path: Path, name: str, array: Any, limits: Limits) -> Column:
    if not isinstance(array, np.ndarray):  # numpy hands out as bytes what is no array
        raise _unreadable(path, ValueError(f"{name}, which is no array"))
    if array.ndim == 0:
        expected, fix = "an array with one entry per sample", "leave it out of the file"
        raise bad_data(f"{path}, {name}", expected, "a single value", fix)
    if len(array) and array.nbytes == 0:  # any number of rows in a file of any size
        found = f"{len(array):,} rows of nothing ({array.dtype}, shape {array.shape})"
        raise bad_data(f"{path}, {name}", "an array that holds something", found, "leave it out of the file")
    limits.check_rows(f"{path}, {name}", len(array))
    if array.dtype.kind in "US" and array.ndim == 1:
        return [as_text(value, f"{path}, {name}, row {row}") for row, value in enumerate(array.tolist())]
    return array


def _unreadable(path: Path, error: Exception) -> DataError:
    said = first_line(error)
    if "pickle" in said.lower():
        said = "Python objects, which are not read because they can run code"
    return bad_data(str(path), "plain arrays", said, "save numbers or text only")
