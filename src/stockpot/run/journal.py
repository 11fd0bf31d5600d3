"""events.jsonl: what happened, one JSON object per line, only ever appended to."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from stockpot import atomic
from stockpot.events import Event

FLUSH_EVERY = 1.0  # seconds a line may stay in this process


class Journal:
    """A listener. Progress is for drawing and is not kept; everything else is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with atomic.writing(path):
            _drop_torn_line(path)
            self._file: TextIO = path.open("a", encoding="utf-8")
        self._flushed = time.monotonic()

    def __call__(self, event: Event) -> None:
        if event.kind == "progress":
            return
        line = {"time": round(time.time(), 3), "kind": event.kind, **_plain(event.data)}
        with atomic.writing(self._path):
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            if time.monotonic() - self._flushed > FLUSH_EVERY:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with atomic.writing(self._path):
            self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last one may be torn while a run is going on or after it was killed."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read().partition(b"\0")[0]  # a power cut may leave zeros where lines were on their way
        file.truncate(content.rfind(b"\n") + 1)


def _plain(data: Mapping[str, Any]) -> dict[str, Any]:
    # JSON has no NaN; a loss that is not a number is written as null.
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}
