"""Every threat here is opened under a watch: no marker may appear and memory may not grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attacks.kit import marker_in

MOST = 150 * 2**20  # bytes that opening a threat may take, for a moment
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def _peak() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.fixture(autouse=True)
def _watched(tmp_path: Path) -> Iterator[None]:
    measured = _STATUS.exists()
    if measured:
        try:
            _RESET.write_text("5")  # the peak starts again from here
        except OSError:
            measured = False
    before = _peak() if measured else 0
    yield
    assert not marker_in(tmp_path).exists(), "code from a file was run"
    if measured:
        assert _peak() - before < MOST
