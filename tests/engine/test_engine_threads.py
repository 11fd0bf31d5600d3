"""Small models run on one thread, and the caller's number comes back."""

from __future__ import annotations

import pytest
import torch

from stockpot.engine.threads import SMALL, threads_for


@pytest.mark.parametrize(("parameters", "threads"), [(SMALL - 1, 1), (SMALL, 3)])
def test_threads(parameters: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads_for(parameters, torch.device("cpu")):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
