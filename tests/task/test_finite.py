"""Bad numbers and odd labels in the data: refused at the door, or with a meaning that is stated here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stockpot.errors import DataError, TaskError
from stockpot.task import Data, Task

from .models import Encoder, blobs, linear

X, Y = blobs()


def spoilt(value: float, *rows: int) -> Tensor:
    x = X.clone()
    for row in rows:
        x[row, -1] = value
    return x


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_is_refused_with_its_sample(value: float) -> None:
    with pytest.raises(DataError) as caught:
        Task(linear(), (spoilt(value, 17, 40), Y))
    text = str(caught.value)
    assert f"fit data, batch[0]: expected finite numbers, found {value} in sample 17" in text
    assert "(2 of 60 samples have such)" in text
    assert "Fix: repair these samples or leave them out" in text


def test_report_data_is_checked_too() -> None:
    with pytest.raises(DataError, match=r"report data, batch\[0\]: .* found nan in sample 3 \(1 of 60"):
        Task(linear(), (X, Y), (spoilt(torch.nan, 3), Y))


def test_data_of_every_form_is_looked_at() -> None:
    bad = spoilt(torch.nan, 59)
    message = "found nan in sample 59"
    with pytest.raises(DataError, match=rf"batch\['inputs'\].* {message}"):
        Task(Encoder(), {"inputs": bad, "labels": Y})
    with pytest.raises(DataError, match=message):
        Task(linear(), (bad.numpy(), Y.numpy()))
    with pytest.raises(DataError, match=message):
        Task(linear(), DataLoader([(x, int(y)) for x, y in zip(bad, Y, strict=True)], batch_size=7))  # type: ignore[arg-type]
    data = Data.of((bad, Y))
    with pytest.raises(DataError, match="found nan in sample 1 "):
        Task(linear(), data.subset(torch.tensor([4, 59])))
    Task(linear(), data.subset(torch.arange(59)))  # the bad one is not among these


def test_samples_of_uneven_shapes_are_looked_at_one_by_one() -> None:
    lengths = [3, 5, 4, 2, 6, 3, 4, 5, 6, 7]
    rows: list[Any] = [(torch.ones(n), n % 3) for n in lengths]
    rows[4][0][2] = torch.nan

    def pad(batch: list[Any]) -> tuple[Tensor, Tensor]:
        wide = torch.zeros(len(batch), 8)
        for row, (x, _) in zip(wide, batch, strict=True):
            row[: len(x)] = x
        return wide[:, :4], torch.tensor([y for _, y in batch])

    with pytest.raises(DataError, match=r"found nan in sample 4 \(1 of 10"):
        Task(linear(), DataLoader(rows, batch_size=2, collate_fn=pad))  # type: ignore[arg-type]
    numbers: list[Any] = [(np.full(n, np.inf if n == 7 else 0.0), n % 3) for n in lengths]
    with pytest.raises(DataError, match=r"found inf in sample 9 "):
        Task(linear(), DataLoader(numbers, batch_size=2, collate_fn=lambda batch: pad([(torch.zeros(2), 0)])))  # type: ignore[arg-type]


def test_integers_and_masks_of_minus_infinity_pass() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.head(x * torch.softmax(mask, dim=1))
            return out

    mask = torch.zeros(60, 4)
    mask[:, 2] = -torch.inf
    assert Task(Masked(), ((X, mask), Y)).score().n == 60


def test_labels_of_a_loss_of_ones_own_may_be_not_known() -> None:
    """NaN for "not measured" is usual in regression on several targets; the loss has to know."""
    y = X.sum(dim=1)
    y[5] = torch.nan

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, target = batch
        known = ~torch.isnan(target)
        error: Tensor = torch.where(known, model(x)[:, 0] - target, 0.0)
        return error.square(), known

    assert torch.isfinite(torch.tensor(Task(linear(), (X, y), loss=loss, metric="loss").score().loss))
    with pytest.raises(DataError, match=r"fit data, batch\[0\].*sample 8"):
        Task(linear(), (spoilt(torch.nan, 8), y), loss=loss, metric="loss")
    soft = torch.softmax(X[:, :3], dim=1)
    soft[7, 0] = torch.nan
    with pytest.raises(DataError, match=r"fit data, batch\[1\].*sample 7"):
        Task(linear(), (X, soft))


def test_labels_out_of_range_in_the_report_data() -> None:
    y = Y.clone()
    y[11] = 3
    with pytest.raises(DataError, match=r"labels of report data: expected 0 to 2 .* found 3 at index 11"):
        Task(linear(), (X, Y), (X, y))


@pytest.mark.parametrize("empty", [(X[:0], Y[:0]), [], {"inputs": X[:0], "labels": Y[:0]}])
def test_an_empty_report_set_is_refused(empty: Any) -> None:
    with pytest.raises(TaskError, match="report data: expected at least one sample, found none"):
        Task(linear(), (X, Y), empty)


# Folds


def test_every_class_is_spread_evenly_over_the_folds() -> None:
    labels = torch.tensor([0] * 40 + [1] * 13 + [2] * 4)
    data = Data.of((torch.zeros(57, 4), labels))
    for inside, outside in data.folds(4, seed=3):
        assert set(labels[inside].tolist()) == {0, 1, 2}
        counts = [int((labels[outside] == c).sum()) for c in range(3)]
        assert counts[0] == 10
        assert counts[1] in (3, 4)
        assert counts[2] == 1


def test_a_class_with_fewer_members_than_folds_is_in_as_many_as_it_can() -> None:
    labels = torch.tensor([0] * 20 + [1, 1] + [2])
    folds = Data.of((torch.zeros(23, 4), labels)).folds(4, seed=0)
    held_out = [int((labels[outside] == 1).sum()) for _, outside in folds]
    assert sorted(held_out) == [0, 0, 1, 1]
    assert all((labels[inside] == 1).any() for inside, _ in folds)  # never all of them in one fold
    assert sum(not (labels[inside] == 2).any() for inside, _ in folds) == 1  # one of a kind: one fold learns without


def test_a_batch_is_never_larger_than_the_data() -> None:
    data = Data.of((X[:5], Y[:5]))
    assert sorted(data.order(0, 0, 128).tolist()) == [0, 1, 2, 3, 4]
    assert sorted(data.order(0, 1, 128).tolist()) == [0, 1, 2, 3, 4]
