"""Parquet files, and Hugging Face datasets as `save_to_disk` leaves them: both are Arrow underneath."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stockpot.adapters.data.columns import Column, Table, not_there
from stockpot.adapters.extras import need
from stockpot.errors import DataError, describe
from stockpot.small_files import read_json


def read_parquet(file: Path) -> Table:
    need("pyarrow")
    parquet = need("pyarrow.parquet")
    try:
        table = parquet.read_table(file)
        table.validate(full=True)
    except Exception as error:
        raise DataError(
            describe(
                str(file), expected="a Parquet file", found=str(error).splitlines()[0], fix="check the file"
            )
        ) from error
    return Table(str(file), _columns(table))


def read_dataset(path: Path, part: str | None) -> Table:
    """Read without the datasets library, whose loading of old formats can run code."""
    folder = _folder(path, part)
    pyarrow = need("pyarrow")
    tables = [_stream(folder / name, pyarrow) for name in _files(folder)]
    try:
        return Table(str(folder), _columns(pyarrow.concat_tables(tables)))
    except pyarrow.ArrowException as error:
        raise _broken(folder, error) from error


def _files(folder: Path) -> list[str]:
    listing = folder / "state.json"
    try:
        names = [entry["filename"] for entry in read_json(listing)["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(listing, error) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise DataError(
                describe(
                    str(listing),
                    expected="names of files in that folder",
                    found=repr(name)[:120],
                    fix="save the dataset again with save_to_disk",
                )
            )
    return names


def _stream(file: Path, pyarrow: Any) -> Any:
    """One file of a dataset. Arrow trusts the offsets in it unless it is asked to look."""
    try:
        with pyarrow.memory_map(str(file)) as source:
            table = pyarrow.ipc.open_stream(source).read_all()
        table.validate(full=True)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise _broken(file, error) from error
    return table


def _broken(file: Path, error: Exception) -> DataError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(
        describe(
            str(file),
            expected="part of a dataset written by save_to_disk",
            found=said,
            fix="save the dataset again with save_to_disk",
        )
    )


def _folder(path: Path, part: str | None) -> Path:
    expected = "a Hugging Face dataset written by save_to_disk"
    if not path.is_dir():
        raise not_there(str(path), expected)
    listing = path / "dataset_dict.json"
    if listing.is_file():
        splits = _splits(listing)
        if part is None and len(splits) == 1:
            part = splits[0]
        if part not in splits:
            raise DataError(
                describe(
                    str(path),
                    expected="the name of one of its splits" if part is None else f"a split {part!r}",
                    found=f"splits {', '.join(splits)}",
                    fix=f"write fit: {splits[-1]}, or {{of: {splits[-1]}, fraction: 0.5}}",
                )
            )
    folder = path if part is None else path / part
    if not (folder / "state.json").is_file():
        raise DataError(
            describe(str(folder), expected=expected, found="no state.json", fix="use dataset.save_to_disk")
        )
    return folder


def _splits(listing: Path) -> list[str]:
    try:
        splits = read_json(listing)["splits"]
        if not isinstance(splits, list) or not all(isinstance(s, str) and Path(s).name == s for s in splits):
            raise ValueError("splits that are no plain names")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _broken(listing, error) from error
    return splits


def _columns(table: Any) -> dict[str, Column]:
    return {name: _column(table.column(name)) for name in table.column_names}


def _column(chunked: Any) -> Column:
    types = need("pyarrow").types
    kind = chunked.type
    if getattr(kind, "storage_type", None) is not None:  # fixed-shape arrays are lists underneath
        chunked = chunked.cast(kind.storage_type)
        kind = kind.storage_type
    if types.is_dictionary(kind):
        return chunked.to_pylist()  # type: ignore[no-any-return]
    if chunked.null_count == 0 and (
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    ):
        return np.asarray(chunked.to_numpy())
    values: list[Any] = chunked.to_pylist()
    if types.is_list(kind) or types.is_fixed_size_list(kind) or types.is_large_list(kind):
        leaf = kind
        while hasattr(leaf, "value_type"):
            leaf = leaf.value_type
        if types.is_integer(leaf) or types.is_floating(leaf) or types.is_boolean(leaf):
            try:
                return np.array(values, dtype=leaf.to_pandas_dtype())  # keeps uint8 pixels uint8
            except (TypeError, ValueError):  # rows of different lengths, or missing values
                return values
    return values
