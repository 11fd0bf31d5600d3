"""Libraries that print or warn on their own are asked not to: what matters comes back as errors of ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_log() -> Iterator[None]:
    """No log records below errors from anyone."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def no_bars(log: Any) -> Iterator[None]:
    """No progress bars either; `log` is `transformers.utils.logging`."""
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        with no_log():
            yield
    finally:
        if shown:
            log.enable_progress_bar()
