"""Checkpoints are read for hours; somebody may write to them meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from stockpot.errors import ChangedError, describe
from stockpot.pool.files import shown

Stamp = tuple[int, int, int]  # size, time of the last change in nanoseconds, which file it is
_SHOWN = 8


def stamps(files: Iterable[Path]) -> dict[Path, Stamp | None]:
    return {file: _stamp(file) for file in files}


def verify_unchanged(before: Mapping[Path, Stamp | None]) -> None:
    """Raise when a file is not the one it was, naming all of them."""
    lines = [line for file, stamp in before.items() if (line := _difference(file, stamp, _stamp(file)))]
    if lines:
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ChangedError(
            describe(
                "the ingredients",
                expected="files that stay as they are while they are used",
                found="\n    ".join(["changes:", *lines[:_SHOWN], *more]) + "\n ",
                fix="let whatever writes to them finish, or restore them, and run again; no soup was written",
            )
        )


def _stamp(file: Path) -> Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _difference(file: Path, before: Stamp | None, now: Stamp | None) -> str | None:
    if before == now:
        return None
    if now is None:
        return f"{shown(file)}: gone"
    if before is not None and before[0] != now[0]:
        return f"{shown(file)}: {before[0]:,} bytes before, {now[0]:,} now"
    return f"{shown(file)}: written to"
