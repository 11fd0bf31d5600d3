"""Safetensors files. The only file that imports the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stockpot.errors import CheckpointError, describe
from stockpot.pool.files import SAFETENSORS, UNKNOWN, looks_like, reason, require_file, shown
from stockpot.pool.header import check_header
from stockpot.pool.source import Source
from stockpot.pool.spec import TensorSpec

# Names as in the safetensors header. Sub-byte types (F4, F6) pack several values in a byte, so that their
# shapes do not mean what ours mean; they are left out on purpose.
_DTYPES = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "C64": "complex64",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
    }.items()
    if hasattr(torch, attribute)  # the newest float8 types are missing in older torch
}


def open_safetensors(path: Path) -> Source:
    size = require_file(path)
    try:
        check_header(path, size)
        handle: Any = safe_open(path, framework="pt", device="cpu")
        headers = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (no mapping)
        declared = {name: (header.get_dtype(), tuple(header.get_shape())) for name, header in headers.items()}
    except Exception as error:  # whatever a hostile header provokes, the user gets our error
        raise _unreadable(path, error) from error
    unknown = sorted({str(dtype) for dtype, _ in declared.values()} - _DTYPES.keys())
    if unknown:
        raise CheckpointError(
            describe(
                shown(path),
                expected=f"tensors of the types {', '.join(_DTYPES)}",
                found=f"{', '.join(unknown)}",
                fix="convert the checkpoint to one of these types (for example bfloat16) and open that",
            )
        )
    specs = {name: TensorSpec(_DTYPES[dtype], shape) for name, (dtype, shape) in declared.items()}

    def read(name: str) -> Tensor:
        tensor: Tensor = handle.get_tensor(name)  # a view into the memory-mapped file
        return tensor

    return Source("safetensors", (path,), specs, read)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    looks = looks_like(path)
    if looks in (SAFETENSORS, UNKNOWN):
        found = f"a damaged or truncated one ({reason(error)})"
        fix = "copy or download it again, or leave it out of the pool"
    else:
        found = looks
        fix = "give the file its right ending (.pt for files of torch.save), or download it again"
    return CheckpointError(describe(shown(path), expected="a whole safetensors file", found=found, fix=fix))
