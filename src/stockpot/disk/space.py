"""Free space, asked for before hours of work and not after them."""

from __future__ import annotations

import shutil
from pathlib import Path

from stockpot.errors import WriteError, describe

MARGIN = 16 * 2**20  # bytes beyond the forecast: directories, reports, lines about what happened


def require_space(path: Path, nbytes: int, what: str) -> None:
    """Raise when `nbytes` and a margin do not fit where `path` is, or will be."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return  # cannot be known; the writes themselves will say
    if free < nbytes + MARGIN:
        raise WriteError(
            describe(
                str(path),
                expected=f"{_size(nbytes + MARGIN)} of free space for {what}",
                found=_size(free),
                fix="free some space or choose another place; nothing was changed",
            )
        )


def _size(nbytes: int) -> str:
    for unit, width in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= width:
            return f"{nbytes / width:.1f} {unit}"
    return f"{nbytes} bytes"
