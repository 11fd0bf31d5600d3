"""What long work tells its caller.

Anything that takes time accepts a `listen` callback and sends it events; `progress` draws them, and the run directory
appends them to `events.jsonl`. Nothing else prints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """One thing that happened. `data` holds plain JSON values only."""

    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The default listener."""


def one_at_a_time(listen: Listener) -> Listener:
    """The same listener for work on several threads."""
    lock = threading.Lock()

    def locked(event: Event) -> None:
        with lock:
            listen(event)

    return locked


def progress(listen: Listener, what: str, done: int, total: int, unit: str = "bytes") -> None:
    listen(Event("progress", {"what": what, "done": done, "total": total, "unit": unit}))
