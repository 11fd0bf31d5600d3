"""How many threads a small model gets on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 300_000  # parameters; below, an operation is over before a second thread has woken up


@contextmanager
def threads_for(parameters: int, device: torch.device) -> Iterator[None]:
    """One thread for a small model: on a busy machine the threads of tiny operations mostly wait for each other.

    A fixed rule, so that the numbers do not depend on what else the machine does.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" and parameters < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
