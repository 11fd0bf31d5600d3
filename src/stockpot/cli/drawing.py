"""Progress: a live bar on a terminal, a line every few seconds elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stockpot.cli.activity import Activity
from stockpot.cli.shell import harmless
from stockpot.events import Event, Listener

FIRST, SLOWEST = (
    5.0,
    60.0,
)  # seconds until a plain line about work in progress; doubled after each, up to this
REFRESH = 0.1  # seconds between redraws


@contextmanager
def drawing() -> Iterator[Listener]:
    """A listener that shows what it hears."""
    if not sys.stderr.isatty():
        yield _Plain()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=8) as bars:
        task = bars.add_task("", total=None)
        activity = Activity()
        last = 0.0

        def listen(event: Event) -> None:
            nonlocal last
            line = activity.hear(event)
            if line is not None:
                bars.console.print(harmless(line), markup=False, highlight=False)
            now = time.monotonic()
            if line is not None or now - last > REFRESH:
                last = now
                total = activity.total or None
                bars.update(
                    task, description=harmless(activity.text[:60]), completed=activity.done, total=total
                )

        yield listen


class _Plain:
    def __init__(self) -> None:
        self._activity = Activity()
        self._last = time.monotonic()
        self._wait = FIRST

    def __call__(self, event: Event) -> None:
        line = self._activity.hear(event)
        now = time.monotonic()
        if line is not None:
            self._wait = FIRST
        elif now - self._last > self._wait and self._activity.text:
            share = (
                f" ({100 * self._activity.done // self._activity.total} %)" if self._activity.total else ""
            )
            line = f"{self._activity.text}{share}"
            self._wait = min(2 * self._wait, SLOWEST)
        if line is not None:
            print(harmless(line), file=sys.stderr, flush=True)
            self._last = now
