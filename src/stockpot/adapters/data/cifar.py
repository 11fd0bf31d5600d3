"""CIFAR python batches. They are pickles: read by an unpickler that can build arrays and nothing else."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.adapters.data.columns import Column, Table, not_there
from stockpot.errors import DataError, describe
from stockpot.pool.pickles import Allowed, check_pickle
from stockpot.small_files import read_bytes

_MOST = 2**30  # bytes; a batch has 30 megabytes, all of CIFAR-100's training data 155
_PLAIN_TYPE = re.compile(r"[<>=|]?[biuf][1248]")
_BLANK = frozenset({"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"})
_FROM_BYTES = frozenset({"numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"})
_NAMES = frozenset({*_BLANK, *_FROM_BYTES, "numpy.ndarray", "numpy.dtype", "_codecs.encode"})

_ALLOWED = Allowed(
    known=_NAMES, called=_NAMES, built=frozenset({*_BLANK, "numpy.dtype"})
)  # what rebuilding a numpy array takes, in every protocol


class _ArraysOnly(pickle.Unpickler):
    """Nothing is looked up in any module: arrays and their types are rebuilt by the stand-ins below."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _BLANK:
            return lambda *_: _Array()
        if full in _FROM_BYTES:
            return _from_bytes
        found = {"numpy.ndarray": _Array, "numpy.dtype": _Type, "_codecs.encode": _encode}.get(full)
        if found is None:
            raise pickle.UnpicklingError(f"it wants to use {full}, which could run code")
        return found

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside the file")


class _Type:
    """Stands in for numpy.dtype, whose own state could declare any bytes to be Python objects."""

    def __init__(self, code: Any, *_: Any) -> None:
        text = code.decode("latin1") if isinstance(code, bytes) else code
        if not isinstance(text, str) or not _PLAIN_TYPE.fullmatch(text):
            raise pickle.UnpicklingError("it holds something other than plain numbers")
        self.code = text.lstrip("<>=|")
        self.order = "<"

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        text = order.decode("latin1") if isinstance(order, bytes) else order
        self.order = text if text in ("<", ">") else "<"

    def plain(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.code)


class _Array:
    """Stands in for an array until its content has come."""

    def __init__(self, *_: Any) -> None:
        self.array: np.ndarray[Any, Any] = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, columns_first, content = state
        self.array = _rebuilt(content, dtype, shape, "F" if columns_first else "C")


def _from_bytes(content: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> _Array:
    """The newest protocol's form of the same."""
    made = _Array()
    made.array = _rebuilt(content, dtype, shape, order)
    return made


def _rebuilt(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, _Type) or not isinstance(content, (bytes, bytearray)):
        raise pickle.UnpicklingError("it holds something other than plain arrays")
    array: np.ndarray[Any, Any] = np.frombuffer(content, dtype.plain()).reshape(
        shape, order="F" if order == "F" else "C"
    )
    return array


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes as newer Pythons write them for older ones."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("it holds text in an unexpected form")
    return text.encode("latin1")


def read(path: Path, part: str | None) -> Table:
    part = part or "train"
    if not path.is_dir():
        raise not_there(str(path), "a folder of CIFAR python batches")
    if part == "train":
        files = sorted(path.glob("data_batch_*")) or [f for f in (path / "train",) if f.is_file()]
    else:
        files = [f for f in (path / "test_batch", path / "test") if f.is_file()] if part == "test" else []
    if not files:
        raise DataError(
            describe(
                f"{path} ({part})",
                expected="data_batch_1 ... and test_batch (CIFAR-10), or train and test (CIFAR-100)",
                found=", ".join(sorted(f.name for f in path.iterdir())[:8]) or "an empty folder",
                fix="parts are called train and test; unpack the archive of the python version",
            )
        )
    batches = [_batch(file) for file in files]
    names = [name for name in batches[0] if name != "image"]
    columns: dict[str, Column] = {
        name: np.concatenate([np.asarray(batch[name]) for batch in batches]) for name in ("image", *names)
    }
    if "label" not in columns:  # CIFAR-100 has two kinds
        columns["label"] = columns["fine_labels"]
    return Table(f"{path} ({part})", columns)


def _batch(file: Path) -> dict[str, Any]:
    try:
        raw = read_bytes(file, _MOST)
        check_pickle(raw, _ALLOWED)
        content = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise almost anything
        raise DataError(
            describe(
                str(file),
                expected="a CIFAR python batch",
                found=f"a file that cannot be read: {error}",
                fix="use the files of the original archive",
            )
        ) from error
    named = {}
    if isinstance(content, dict):
        named = {
            k.decode("latin1") if isinstance(k, bytes) else k: v.array if isinstance(v, _Array) else v
            for k, v in content.items()
        }
    pixels = named.get("data")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        raise DataError(
            describe(
                str(file),
                expected="an array `data` of 3072 bytes per image",
                found=f"{getattr(pixels, 'dtype', 'none')} {getattr(pixels, 'shape', '')}".strip(),
                fix="use the files of the original archive",
            )
        )
    batch: dict[str, Any] = {"image": pixels.reshape(-1, 3, 32, 32)}
    for given, ours in (
        ("labels", "label"),
        ("fine_labels", "fine_labels"),
        ("coarse_labels", "coarse_labels"),
    ):
        if given in named:
            batch[ours] = _labels(named[given], file)
    return batch


def _labels(value: Any, file: Path) -> np.ndarray[Any, Any]:
    whole = isinstance(value, list) and all(type(label) is int and 0 <= label < 2**31 for label in value)
    if whole or (isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"):
        return np.asarray(value, dtype=np.int64)
    raise DataError(
        describe(
            str(file),
            expected="labels that are whole numbers",
            found=type(value).__name__,
            fix="use the files of the original archive",
        )
    )
