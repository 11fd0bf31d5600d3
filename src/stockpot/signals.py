"""Asked to stop in the middle of a step: finish it, save, and only then stop.

Ctrl-C, SIGTERM and a closed terminal would end the process wherever it is. Inside `held` they wait; the work asks
`stop.asked` at places where its state is whole, saves, and calls `stop.obey()`. Asked twice, nothing waits.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def known() -> list[signal.Signals]:
    """Those of this system."""
    return [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Signals to stop go to `handler` while the block runs, except those that are ignored: nohup means it."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # others may not set handlers, and get no signals
        for number in known():
            current = signal.getsignal(number)
            if current is not signal.SIG_IGN and current is not None:  # None: not set by Python, not ours to touch
                before[number] = current
                signal.signal(number, handler)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


class Stop:
    """Whether somebody has asked to stop since the block began."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._handlers = contextlib.ExitStack()

    @property
    def asked(self) -> bool:
        return self._first is not None

    def obey(self) -> None:
        """Do now what the signal would have done at once; nothing when there was none."""
        if self._first is not None:
            number, self._first = self._first, None
            self._handlers.close()
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  (a handler's shape)
        if self._first is not None:
            self.obey()
        self._first = number


@contextlib.contextmanager
def held() -> Iterator[Stop]:
    """Signals to stop wait until the work has saved, or at the latest until the block ends."""
    stop = Stop()
    with stop._handlers:
        stop._handlers.enter_context(handled(stop._note))
        yield stop
    stop.obey()
