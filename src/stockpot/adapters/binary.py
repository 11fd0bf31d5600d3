"""Binary files with columns: numpy and safetensors arrays, Parquet, and Hugging Face datasets (`save_to_disk`).

The last two are Arrow underneath, and read with pyarrow alone. The datasets library would bring 22 more packages, and
nothing that limits what a small file unfolds to (docs/decisions.md).
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stockpot.adapters.code import need
from stockpot.adapters.tables import (
    LIMITS,
    Array,
    Column,
    Limits,
    Table,
    as_text,
    bad_data,
    first_line,
    not_there,
)  # fmt: skip
from stockpot.errors import DataError
from stockpot.files import read_json
from stockpot.pool import open_checkpoint

# numpy and safetensors ------------------------------------------------------------------------------

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
    return {name: _checked_array(path, name, array, limits) for name, array in arrays.items()}


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


def _checked_array(path: Path, name: str, array: Any, limits: Limits) -> Column:
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


# Arrow ----------------------------------------------------------------------------------------------

_BATCH = 65_536  # Rows that Parquet decodes at once, where they are small.
_WIDTH = {"INT64": 8, "DOUBLE": 8, "INT96": 12, "INT32": 4, "FLOAT": 4}
_SHARED = ("string_view", "binary_view", "list_view", "large_list_view", "run_end_encoded")


def read_parquet(file: Path, limits: Limits) -> dict[str, Column]:
    parquet = need("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as opened:
            about = opened.metadata
            limits.check_rows(file, about.num_rows)
            groups = [about.row_group(index) for index in range(about.num_row_groups)]
            chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
            limits.check_unfolded(file, sum(c.num_values * _WIDTH.get(c.physical_type, 1) for c in chunks))
            # One value may stand in the file once and in a million rows: few rows at a time, counted as they come.
            largest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
            size = min(_BATCH, max(1, limits.unfolded(file) // (8 * max(largest, 1))))
            return _columns(_checked(opened.iter_batches(size), file, limits), opened.schema_arrow)
    except DataError:
        raise
    except Exception as error:  # a damaged file raises almost anything
        raise bad_data(file, "a Parquet file", first_line(error), "check the file") from error


def read_dataset(path: Path, part: str | None, limits: Limits = LIMITS) -> Table:
    """A Hugging Face dataset as `save_to_disk` leaves it: Arrow streams, and a state file that lists them."""
    folder, pyarrow = _dataset_folder(path, part), need("pyarrow")
    listing = folder / "state.json"
    files = [folder / name for name in _listed(listing, lambda state: [f["filename"] for f in state["_data_files"]])]
    if not files or not all(file.is_file() for file in files):
        raise _broken(listing, f"{', '.join(file.name for file in files) or 'no files'}, which are not there")
    batches: list[Any] = []
    for file in files:
        try:
            stream = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
            batches += _checked(stream, file, limits)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise _broken(file, first_line(error)) from error
    limits.check_rows(folder, sum(batch.num_rows for batch in batches))
    try:
        return Table(str(folder), _columns(batches, stream.schema))
    except pyarrow.ArrowException as error:
        raise _broken(folder, "files with different columns") from error


def _dataset_folder(path: Path, part: str | None) -> Path:
    expected = "a Hugging Face dataset written by save_to_disk"
    if not path.is_dir():
        raise not_there(path, expected)
    listing = path / "dataset_dict.json"
    if listing.is_file():
        splits = _listed(listing, lambda content: content["splits"])
        if part is None and len(splits) == 1:
            part = splits[0]
        if part not in splits:
            wanted = "the name of one of its splits" if part is None else f"a split {part!r}"
            fix = "write fit: {0}, or {{of: {0}, fraction: 0.5}}".format(splits[-1] if splits else "NAME")
            raise bad_data(path, wanted, f"splits {', '.join(splits)}", fix)
    folder = path if part is None else path / part
    if not (folder / "state.json").is_file():
        raise bad_data(folder, expected, "no state.json", "use dataset.save_to_disk")
    return folder


def _listed(file: Path, pick: Callable[[Any], Any]) -> list[str]:
    """Names in a listing, none of which leads out of its folder."""
    try:
        names = pick(read_json(file, follow=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(file, first_line(error)) from error
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise _broken(file, repr(names)[:120], "names of files in that folder")
    return names


def _broken(file: Path, found: str, expected: str = "part of a dataset written by save_to_disk") -> DataError:
    return bad_data(file, expected, found, "save the dataset again with save_to_disk")


def _checked(batches: Iterable[Any], file: Path, limits: Limits) -> Iterator[Any]:
    """Arrow trusts the offsets in a file unless it is asked to look, and never asks what the values come to."""
    pyarrow, rows, cost = need("pyarrow"), 0, 0
    for batch in batches:
        rows += batch.num_rows
        limits.check_rows(file, rows)
        batch.validate(full=True)
        cost += sum(_cost(column, pyarrow) for column in batch.columns)
        limits.check_unfolded(file, cost)
        yield batch


def _columns(batches: Iterable[Any], schema: Any) -> dict[str, Column]:
    pyarrow = need("pyarrow")
    table = pyarrow.Table.from_batches(batches, schema)
    return {name: _column(table.column(name), pyarrow) for name in dict.fromkeys(table.column_names)}


def _cost(array: Any, pyarrow: Any) -> int:
    """Bytes of the values if nothing is shared; at least one each, because some types store none."""
    kind, types = array.type, pyarrow.types
    if str(kind).partition("<")[0] in _SHARED or types.is_union(kind):
        raise ValueError(f"a column of type {kind}, in which values share their content")
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _cost(array.storage, pyarrow)
    if types.is_dictionary(kind):
        return len(array) * 8 + _cost(array.dictionary, pyarrow)
    if types.is_struct(kind):
        return len(array) + sum(_cost(child, pyarrow) for child in array.flatten())
    if types.is_map(kind):
        return len(array) + _cost(array.keys, pyarrow) + _cost(array.items, pyarrow)
    if _is_list(kind, types):
        return len(array) + _cost(array.flatten(), pyarrow)
    return max(len(array), int(array.nbytes))


def _column(chunked: Any, pyarrow: Any) -> Column:
    kind, chunks = chunked.type, [chunk for chunk in chunked.chunks if len(chunk)]
    if isinstance(kind, pyarrow.FixedShapeTensorType) and chunks and chunked.null_count == 0:
        return np.concatenate([chunk.to_numpy_ndarray() for chunk in chunks])
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _column(pyarrow.chunked_array([c.storage for c in chunks], kind.storage_type), pyarrow)
    if pyarrow.types.is_dictionary(kind):  # equal values stay one object
        words = [(chunk.dictionary.to_pylist(), chunk.indices.to_pylist()) for chunk in chunks]
        return [None if index is None else values[index] for values, indices in words for index in indices]
    arrays = [_dense(chunk, pyarrow) for chunk in chunks]
    dense = [array for array in arrays if array is not None]
    if dense and len(dense) == len(chunks) and len({array.shape[1:] for array in dense}) == 1:
        return np.concatenate(dense)
    return list(chunked.to_pylist())


def _dense(chunk: Any, pyarrow: Any) -> Array | None:
    """Numbers, or lists in lists of numbers, as an array; None where lengths differ or something is missing."""
    shape, types, compute = [len(chunk)], pyarrow.types, need("pyarrow.compute")
    while _is_list(chunk.type, types):
        lengths = compute.min_max(compute.list_value_length(chunk)).as_py()
        if chunk.null_count or lengths["min"] != lengths["max"] or not lengths["max"]:
            return None
        shape.append(lengths["max"])
        chunk = chunk.flatten()
    kind = chunk.type
    if chunk.null_count or not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    array: Array = chunk.to_numpy(zero_copy_only=False).reshape(shape)
    return array


def _is_list(kind: Any, types: Any) -> bool:
    return bool(types.is_list(kind) or types.is_fixed_size_list(kind) or types.is_large_list(kind))
