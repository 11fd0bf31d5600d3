"""Rows copied together by several threads are the rows."""

from __future__ import annotations

import pytest
import torch

from stockpot.engine import gather
from stockpot.engine.gather import Gather


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0,)])
@pytest.mark.parametrize("small", [0, 1 << 20])
def test_the_same_rows_as_index_select(
    dtype: torch.dtype, shape: tuple[int, ...], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "SMALL", small)
    column = torch.randint(0, 2, (50, *shape)).to(dtype)
    for rows in (torch.randint(0, 50, (21,)), torch.tensor([49, 0]), torch.tensor([3])):
        out = torch.zeros(len(rows), *shape, dtype=dtype)
        gathered = Gather()
        gathered(column, rows, out)
        gathered.close()
        assert torch.equal(out, column[rows])


def test_a_column_that_is_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "SMALL", 0)
    column = torch.arange(60.0).view(6, 10).T
    out = torch.empty(3, 6)
    Gather()(column, torch.tensor([9, 0, 4]), out)
    assert torch.equal(out, column[[9, 0, 4]])
