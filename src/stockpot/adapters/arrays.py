"""numpy and safetensors arrays: one file with several arrays, or a folder of `.npy` files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.adapters.data.columns import Column, Table, not_there
from stockpot.errors import CheckpointError, DataError, describe

_FILES = (".npz", ".safetensors")
_INFLATION = 100  # times its size that an archive may unfold to


def read(path: Path, part: str | None) -> Table:
    if part is not None and path.is_dir():
        for place in (path / part, *(path / f"{part}{suffix}" for suffix in _FILES)):
            if place.exists():
                return Table(str(place), _load(place))
        if len(known := _files(path)) > 1 and not any(path.glob("*.npy")):
            raise DataError(
                describe(
                    f"part {part!r} of {path}",
                    expected=f"a file such as {part}.npz",
                    found=", ".join(known),
                    fix="name one of them as the split, such as fit: val",
                )
            )
    columns = _load(path)
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
        raise DataError(
            describe(
                f"part {part!r} of {path}",
                expected=f"a file of that name, or arrays such as x_{part} and y_{part}",
                found=f"arrays {', '.join(columns)}",
                fix="name a part that is there, or use fractions",
            )
        )
    return chosen


def _files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.suffix in _FILES)


def _load(path: Path) -> dict[str, Column]:
    if path.is_dir():
        files = sorted(path.glob("*.npy"))
        if files:
            return {file.stem: _checked(file, file.stem, _npy(file)) for file in files}
        known = _files(path)
        if len(known) == 1:
            return _load(path / known[0])
        raise DataError(
            describe(
                str(path),
                expected="one .npz or .safetensors file, or .npy files",
                found=f"{', '.join(known)}" if known else "none of them",
                fix="name one of them as the split, such as fit: val.npz",
            )
        )
    if not path.is_file():
        raise not_there(str(path), "a .npz or .safetensors file, or a folder of .npy files")
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix == ".npz":
        try:
            _check_inflated(path)
            with np.load(path, allow_pickle=False) as content:
                return {name: _checked(path, name, content[name]) for name in content.files}
        except DataError:
            raise
        except Exception as error:  # a damaged archive can raise almost anything
            raise _unreadable(path, error) from error
    raise DataError(
        describe(
            str(path),
            expected="a .npz or .safetensors file, or a folder of .npy files",
            found=path.suffix or "no ending",
            fix="save inputs and labels together with numpy.savez(path, x=..., y=...)",
        )
    )


def _npy(path: Path) -> np.ndarray[Any, Any]:
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        with path.open("rb") as file:
            array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:
        raise _unreadable(path, error) from error
    return array


def _check_inflated(path: Path) -> None:
    """Zeros shrink a thousandfold: a small archive may hold more than the machine. Data worth having does not."""
    with zipfile.ZipFile(path) as archive:
        total = sum(record.file_size for record in archive.infolist())
    if total > max(_INFLATION * path.stat().st_size, 2**26):
        raise ValueError(f"{total:,} bytes in an archive of {path.stat().st_size:,}")


def _safetensors(path: Path) -> dict[str, Column]:
    import torch

    from stockpot.pool.safetensors_files import open_safetensors

    try:
        file = open_safetensors(path)
        tensors = {name: file.read(name) for name in file.specs}
        halves = (torch.bfloat16, torch.float16)
        return {
            name: _checked(path, name, (tensor.float() if tensor.dtype in halves else tensor).numpy())
            for name, tensor in tensors.items()
        }
    except (CheckpointError, TypeError) as error:
        raise _unreadable(path, error) from error


def _checked(path: Path, name: str, array: Any) -> Column:
    if not isinstance(array, np.ndarray):  # numpy hands out as bytes what is no array
        raise _unreadable(path, ValueError(f"{name}, which is no array"))
    if array.ndim == 0:
        raise DataError(
            describe(
                f"{path}, {name}",
                expected="an array with one entry per sample",
                found="a single value",
                fix="leave it out of the file",
            )
        )
    if array.dtype.kind in "US":
        return [str(value) for value in array.tolist()]
    return array


def _unreadable(path: Path, error: Exception) -> DataError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "pickle" in said.lower():
        said = "Python objects, which are not read because they can run code"
    return DataError(
        describe(str(path), expected="plain arrays", found=said, fix="save numbers or text only")
    )
