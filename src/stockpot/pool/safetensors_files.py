"""Safetensors files: is the header one that can be true, and then the library opens it.

The library checks most of a header itself, in ways that differ from version to version. What it does not see is a name
that appears twice: it keeps one of the two. So all of it is checked here before the library sees the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import safe_open

from stockpot.files import parse_json
from stockpot.pool import source
from stockpot.pool.source import Checkpoint, TensorSpec, reason, refusal, spec_of

METADATA = "__metadata__"  # an entry of the header that is no tensor
_MOST_HEADER = 100_000_000  # bytes; the library's own limit
_LARGEST = 2**62  # bytes and elements; what any file could have
# Names as in the header. Sub-byte types (F4, F6) pack several values in a byte, so that their shapes do not mean
# what ours mean; they are left out on purpose.
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "C64": "complex64", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# The newest float8 types are missing in older torch.
_DTYPES: dict[str, torch.dtype] = {n: getattr(torch, name) for n, name in _NAMES.items() if hasattr(torch, name)}
# The library writes wide types first, so that all of them are aligned: this order, backwards.
_ORDER = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16"),
    *("I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)


class HeaderError(Exception):
    """What cannot be true."""


def open_safetensors(path: Path) -> Checkpoint:
    size = source.require_file(path)
    try:
        header = read_header(path, size)
        handle: Any = safe_open(path, framework="pt", device="cpu")
    except Exception as error:  # whatever a hostile header provokes, the user gets our error
        found = source.looks_like(path)
        fix = "give the file its right ending (.pt for files of torch.save), or download it again"
        if found in (source.SAFETENSORS, source.UNKNOWN):
            found, fix = f"a damaged or truncated one ({reason(error)})", source.COPY_AGAIN
        raise refusal(path, "a whole safetensors file", found, fix) from error
    if unknown := sorted({entry["dtype"] for entry in header.values()} - _DTYPES.keys()):
        fix = "convert the checkpoint to one of these types (for example bfloat16) and open that"
        raise refusal(path, f"tensors of the types {', '.join(_DTYPES)}", ", ".join(unknown), fix)
    specs = {name: spec_of(_DTYPES[e["dtype"]], tuple(e["shape"])) for name, e in header.items()}
    return Checkpoint(path, "safetensors", (path,), specs, handle.get_tensor)


def read_header(path: Path, size: int) -> dict[str, Any]:
    """The entries of all tensors, which fill the file without holes or overlaps; HeaderError where they do not."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_HEADER, size - 8):
            raise HeaderError(f"a header of {length:,} bytes in a file of {size:,}")
        text = file.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise HeaderError(f"a header that is no valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise HeaderError("a header that is no table of tensors")
    header.pop(METADATA, None)
    end = 0
    for start, stop, name in sorted(_stretch(name, entry) for name, entry in header.items()):
        if start != end:
            raise HeaderError(f"data of {name[:80]!r} that starts at byte {start:,}, not at {end:,}")
        end = stop
    if 8 + length + end != size:
        raise HeaderError(f"{size:,} bytes where the header speaks of {8 + length + end:,}")
    return header


def header_of(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, as the library writes it, and where behind it each tensor begins."""
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    order = sorted(specs, key=lambda name: (-_ORDER.index(codes[specs[name].dtype]), name.encode()))
    places: dict[str, int] = {}
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name in order:
        spec, places[name] = specs[name], end
        end += spec.nbytes
        offsets = [places[name], end]
        entries[name] = {"dtype": codes[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _stretch(name: str, entry: Any) -> tuple[int, int, str]:
    """Where the data of one tensor begins and ends."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise HeaderError(f"no type, shape and place for {name[:80]!r}")
    start, stop = offsets
    # A length of zero may stand beside lengths that no tensor can have.
    if start > stop or math.prod(n for n in shape if n) > _LARGEST:
        raise HeaderError(f"a shape or place that {name[:80]!r} cannot have")
    return start, stop, name


def _whole(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _LARGEST for n in value)
