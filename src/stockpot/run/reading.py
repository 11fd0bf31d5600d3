"""Reading the files of a run record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stockpot import small_files
from stockpot.errors import RunError, describe


def read_json(path: Path) -> Any:
    if not path.exists():
        return None
    with readable(path):
        return small_files.read_json(path)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """A file of the record that somebody damaged or removed, in our words."""
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise RunError(
            describe(
                str(path),
                expected="a file of a run record",
                found=str(error),
                fix="restore it from a copy, or start again with another output directory",
            )
        ) from error
