"""Asked to stop in the middle of a step: finish it, save, and only then stop.

Ctrl-C, SIGTERM and a closed terminal would end the process wherever it is. Inside `held` they wait; the work asks
`stop.asked` at places where its state is whole, saves, and calls `stop.obey()`. Asked twice, nothing waits.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def known() -> list[signal.Signals]:
    """Those of this system."""
    return [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


class Stop:
    """Whether somebody has asked to stop since the block began."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self._first is not None

    def obey(self) -> None:
        """Do now what the signal would have done at once; nothing when there was none."""
        if self._first is not None:
            number, self._first = self._first, None
            self._restore()
            signal.raise_signal(number)

    def _take(self) -> None:
        for number in known():
            current = signal.getsignal(number)
            if current is not signal.SIG_IGN and current is not None:  # None: not set by Python, not ours to touch
                self._before[number] = current
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (a handler's shape)
        if self._first is not None:
            self.obey()
        self._first = number

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@contextlib.contextmanager
def held() -> Iterator[Stop]:
    """Signals to stop wait until the work has saved, or at the latest until the block ends."""
    stop = Stop()
    if threading.current_thread() is threading.main_thread():  # others may not set handlers, and get no signals
        stop._take()
    try:
        yield stop
    except BaseException:
        stop._restore()
        raise
    stop._restore()
    stop.obey()
