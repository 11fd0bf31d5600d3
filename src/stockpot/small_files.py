"""Small files that may come from anyone: read whole, but only ordinary ones of bearable size.

Opening a FIFO waits for ever and a device never ends, so neither is opened to be read. JSON that says a key twice is
refused: every reader would be free to believe another of the two.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LIMIT = 64 * 2**20  # bytes; ours have kilobytes, the largest index of shards has a few megabytes


def read_bytes(path: Path, limit: int = LIMIT) -> bytes:
    """The content. Raises OSError or ValueError and nothing else."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # does not wait for a FIFO's writer
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if status.st_size > limit:
            raise ValueError(f"{status.st_size:,} bytes, more than such a file has")
        return file.read(status.st_size)


def read_text(path: Path, limit: int = LIMIT) -> str:
    return read_bytes(path, limit).decode("utf-8")


def read_json(path: Path, limit: int = LIMIT) -> Any:
    return parse_json(read_bytes(path, limit))


def parse_json(content: bytes | str) -> Any:
    """Plain values. Raises ValueError and nothing else."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} appears twice")
        found[key] = value
    return found
