"""Does the header of a safetensors file say something that can be true?

The library checks most of this itself, in ways that differ from version to version. What it does not see is a name that
appears twice: it keeps one of the two. We check all of it before the library sees the file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeGuard

from stockpot.small_files import parse_json

_MOST_HEADER = 100_000_000  # bytes; the library's own limit
_METADATA = "__metadata__"
_LARGEST = 2**62  # bytes and elements; what any file could have


class HeaderError(Exception):
    """What cannot be true."""


def check_header(path: Path, size: int) -> None:
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
    header.pop(_METADATA, None)
    stretches = sorted(_stretch(name, entry) for name, entry in header.items())
    end = 0
    for start, stop, name in stretches:
        if start != end:
            raise HeaderError(f"data of {name[:80]!r} that starts at byte {start:,}, not at {end:,}")
        end = stop
    if 8 + length + end != size:
        raise HeaderError(f"{size:,} bytes where the header speaks of {8 + length + end:,}")


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
