"""A safetensors header must be able to be true, to the byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from stockpot.pool.safetensors_files import HeaderError, read_header


def written(folder: Path, header: Any, data: int = 16, spaces: int = 0) -> tuple[Path, int]:
    text = (json.dumps(header) if not isinstance(header, str) else header).encode() + b" " * spaces
    path = folder / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path, 8 + len(text) + data


def entry(start: int, stop: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"w": entry(0, 16, 4)}, 16),
        ({"b": entry(8, 16, 2), "a": entry(0, 8, 2)}, 16),
        ({"__metadata__": {"format": "pt"}, "w": entry(0, 16, 4)}, 16),
        ({"empty": entry(0, 0, 0, 3), "w": entry(0, 16, 4), "last": entry(16, 16, 0)}, 16),
        ({"scalar": entry(0, 4)}, 4),
        ({}, 0),
        ({"w": entry(0, 0, 0, 2**62)}, 0),
    ],
)
def test_headers_that_can_be_true(tmp_path: Path, header: Any, data: int) -> None:
    for spaces in (0, 5):
        read_header(*written(tmp_path, header, data, spaces))


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"w": entry(0, 16, 4)}, 17, "bytes where the header speaks of"),
        ({"w": entry(0, 16, 4)}, 15, "bytes where the header speaks of"),
        ({"a": entry(1, 16, 4)}, 16, "starts at byte 1, not at 0"),
        ({"a": entry(0, 8, 2), "b": entry(7, 16, 2)}, 16, "starts at byte 7, not at 8"),
        ({"w": entry(9, 8, 2)}, 16, "cannot have"),
        ({"w": entry(0, 0, 0, 2**62, 2)}, 0, "cannot have"),
        ({"w": entry(0, 2**62 + 1, 2)}, 0, "no type, shape and place"),
        ({"w": entry(0, 0, 2**62 + 1)}, 0, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "data_offsets": [0]}}, 16, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "data_offsets": [0, 8, 16]}}, 16, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "data_offsets": None}}, 16, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "dtype": 1}}, 16, "no type, shape and place"),
        ({"w": {**entry(0, 16, 4), "shape": "4"}}, 16, "no type, shape and place"),
        ({"w": None}, 16, "no type, shape and place"),
        ({"w": entry(0, 16, 4), "__metadata": {}}, 16, "no type, shape and place"),
        ([], 16, "no table of tensors"),
        ("{", 16, "no valid JSON"),
    ],
)
def test_headers_that_cannot(tmp_path: Path, header: Any, data: int, words: str) -> None:
    with pytest.raises(HeaderError, match=words):
        read_header(*written(tmp_path, header, data))


def test_a_header_may_fill_the_file_and_no_more(tmp_path: Path) -> None:
    path, size = written(tmp_path, {}, 0)
    read_header(path, size)
    for length in (size - 7, 2**63, 100_000_001):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(HeaderError, match=f"a header of {length:,} bytes in a file of {size}"):
            read_header(path, size)
