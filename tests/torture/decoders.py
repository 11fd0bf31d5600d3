"""What the bytes of a checkpoint say, read without stockpot, safetensors or torch: struct, json, numpy.

Deliberately another road than the package takes: where both arrive, they must have seen the same tensors.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np

# name -> (type, shape, bytes in row-major order)
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SIZES |= {"U64": 8, "U32": 4, "U16": 2, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U64": "uint64", "U32": "uint32", "U16": "uint16",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_STORAGES = {
    "FloatStorage": ("float32", 4), "DoubleStorage": ("float64", 8), "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2), "LongStorage": ("int64", 8), "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2), "CharStorage": ("int8", 1), "ByteStorage": ("uint8", 1), "BoolStorage": ("bool", 1),
    "ComplexFloatStorage": ("complex64", 8), "ComplexDoubleStorage": ("complex128", 16),
}  # fmt: skip


def safetensors(content: bytes) -> Tensors:
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length].decode("utf-8"))
    header.pop("__metadata__", None)
    data = content[8 + length :]
    found: Tensors = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        raw = data[start:stop]
        count = 1
        for n in entry["shape"]:
            count *= n
        assert len(raw) == stop - start == count * _SIZES[entry["dtype"]], name
        found[name] = (_TYPES[entry["dtype"]], tuple(entry["shape"]), raw)
    return found


def records(content: bytes) -> dict[str, bytes]:
    """The stored records of a zip file, by its central directory."""
    end = content.rfind(b"PK\x05\x06")
    count, _, place = struct.unpack_from("<HII", content, end + 10)
    if content[end - 20 : end - 16] == b"PK\x06\x07":
        (wide,) = struct.unpack_from("<Q", content, end - 12)
        count, _, place = struct.unpack_from("<QQQ", content, wide + 32)
    found: dict[str, bytes] = {}
    for _ in range(count):
        (method,) = struct.unpack_from("<H", content, place + 10)
        size, full, name_size, extra_size, comment_size = struct.unpack_from("<IIHHH", content, place + 20)
        (local,) = struct.unpack_from("<I", content, place + 42)
        name = content[place + 46 : place + 46 + name_size].decode("utf-8")
        assert method == 0, name
        assert size == full, name
        inner_name, inner_extra = struct.unpack_from("<HH", content, local + 26)
        start = local + 30 + inner_name + inner_extra
        assert start + size <= len(content), name
        found[name] = content[start : start + size]
        place += 46 + name_size + extra_size + comment_size
    return found


class _Name:
    """Stands in for anything a pickle names; calling it notes what it was called with."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        if self.name == "OrderedDict":
            return _Table(*arguments)
        if self.name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return arguments[0]
        return (self.name, *arguments)


class _Table(dict[Any, Any]):
    def __setstate__(self, state: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Name(name)

    def persistent_load(self, place: Any) -> Any:
        return place


def torch_archive(content: bytes, key: str | None = None) -> Tensors:
    """The tensors of the mapping at the top, or under a dotted key."""
    found = records(content)
    (table,) = [name for name in found if name.endswith("/data.pkl")]
    root = table.removesuffix("/data.pkl")
    saved = _Reader(io.BytesIO(found[table])).load()
    mapping = saved
    for part in key.split(".") if key is not None else ():
        mapping = mapping[part]
    return {
        name: _tensor(value, found, root)
        for name, value in mapping.items()
        if isinstance(value, tuple) and value and value[0] in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
    }


def _tensor(value: Any, found: dict[str, bytes], root: str) -> tuple[str, tuple[int, ...], bytes]:
    _, (_, kind, key, _, count), offset, shape, stride, *_ = value
    dtype, size = _STORAGES[kind.name]
    raw = np.frombuffer(found[f"{root}/data/{key}"], f"V{size}")
    assert len(raw) == count
    span = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
    if all(shape):
        assert offset >= 0, shape
        assert span <= count, shape
        strides = [step * size for step in stride]
        raw = np.lib.stride_tricks.as_strided(raw[offset:], shape, strides)
        return dtype, tuple(shape), np.ascontiguousarray(raw).tobytes()
    return dtype, tuple(shape), b""


def directory(folder: Path) -> Tensors:
    """A Hugging Face directory with an index."""
    (index,) = folder.glob("*.index.json")
    where = json.loads(index.read_bytes().decode("utf-8"))["weight_map"]
    read = safetensors if ".safetensors." in index.name else torch_archive
    shards = {name: read((folder / name).read_bytes()) for name in set(where.values())}
    return {name: shards[shard][name] for name, shard in where.items()}
