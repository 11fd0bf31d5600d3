"""CIFAR python batches. They are pickles: read by an unpickler that can build arrays and nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from stockpot.adapters.data.columns import Column, Table, not_there
from stockpot.errors import DataError, describe


class _ArraysOnly(pickle.Unpickler):
    """Anything that is not part of rebuilding a numpy array is refused before it is looked up."""

    _allowed: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _blank
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return _from_bytes
        if (module, name) == ("_codecs", "encode"):
            return _encode
        found = self._allowed.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it wants to use {module}.{name}, which could run code")
        return found

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside the file")


def _blank(kind: Any, _shape: Any, _code: Any) -> np.ndarray[Any, Any]:
    """What numpy's own reconstruction does: an empty array whose content follows."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError("it holds something other than plain arrays")
    return np.empty(0, np.uint8)


def _from_bytes(buffer: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> np.ndarray[Any, Any]:
    """The newest protocol's form of the same."""
    array: np.ndarray[Any, Any] = np.frombuffer(buffer, dtype).reshape(shape, order=order)
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
        with file.open("rb") as stream:
            content = _ArraysOnly(stream, encoding="bytes").load()
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
        named = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}
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
            batch[ours] = np.asarray(named[given], dtype=np.int64)
    return batch
