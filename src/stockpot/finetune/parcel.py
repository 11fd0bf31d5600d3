"""Objects for another process: small tensors by value, the large ones of data through shared memory."""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch import Tensor

from stockpot.errors import TaskError, describe

LARGE = 2**20  # bytes from which sharing beats a copy; each shared tensor holds a file descriptor


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: list[Tensor] | None) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_id(self, value: Any) -> int | None:
        if self.shared is None or not isinstance(value, Tensor) or value.nbytes < LARGE:
            return None
        try:
            value.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return None  # containers often have little shared memory; a copy always works
        self.shared.append(value)
        return len(self.shared) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Tensor]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, index: int) -> Tensor:
        return self.shared[index]


def pack(value: Any, *, share: bool) -> tuple[bytes, list[Tensor]]:
    """Never share what is written to, such as a model: its copies would train each other."""
    file, shared = io.BytesIO(), list[Tensor]()
    try:
        _Packer(file, shared if share else None).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TaskError(
            describe(
                "parallel trials",
                expected="a model, loss, metric and data that can be sent to another process",
                found=f"{type(error).__name__}: {error}",
                fix="define them at the top level of an importable module, or use parallel=1",
            )
        ) from error
    return file.getvalue(), shared


def unpack(content: bytes, shared: list[Tensor]) -> Any:
    return _Unpacker(io.BytesIO(content), shared).load()
