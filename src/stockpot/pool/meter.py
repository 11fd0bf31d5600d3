"""Progress events at a rate that a log can bear."""

from __future__ import annotations

from stockpot.events import Listener, progress

_STEPS = 200  # at most about this many events, however many tensors there are


class Meter:
    def __init__(self, listen: Listener, what: str, total: int) -> None:
        self._listen, self._what, self._total = listen, what, total
        self._done = 0
        self._next = 0
        self.add(0)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._done >= self._next:
            progress(self._listen, self._what, self._done, self._total)
            self._next = min(self._done + max(self._total // _STEPS, 1), max(self._total, self._done + 1))
