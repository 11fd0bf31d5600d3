"""Laws of the data order and of the folds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stockpot.errors import DataError
from stockpot.task import Data

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)


def data_of(n: int) -> Data:
    return Data.of((torch.arange(n).float(), torch.arange(n) % 3))


@given(n=sizes, seed=seeds, batch=st.integers(1, 50), epochs=st.integers(1, 4))
def test_every_sample_once_per_epoch(n: int, seed: int, batch: int, epochs: int) -> None:
    data = data_of(n)
    size = min(batch, n)
    steps = -(-epochs * n // size)
    stream = torch.cat([data.order(seed, step, batch) for step in range(steps)])
    assert len(stream) == steps * size
    for epoch in range(epochs):
        assert stream[epoch * n : (epoch + 1) * n].sort().values.equal(torch.arange(n))


@given(n=sizes, seed=seeds, batch=st.integers(1, 50), step=st.integers(0, 1000))
def test_a_restart_at_any_step_gives_the_same_batch(n: int, seed: int, batch: int, step: int) -> None:
    from stockpot.task.data import _permutation

    walked = [data_of(n).order(seed, s, batch) for s in range(max(step - 2, 0), step + 1)][-1]
    _permutation.cache_clear()
    assert data_of(n).order(seed, step, batch).equal(walked)


def test_batch_size_does_not_change_the_stream() -> None:
    data = data_of(12)
    by_three = torch.cat([data.order(5, step, 3) for step in range(8)])
    by_four = torch.cat([data.order(5, step, 4) for step in range(6)])
    assert by_three.equal(by_four)


def test_epochs_and_seeds_differ() -> None:
    data = data_of(30)
    orders = {tuple(data.order(seed, step, 30).tolist()) for seed in range(4) for step in range(4)}
    assert len(orders) == 16  # also seed 1 epoch 2 against seed 2 epoch 1


def test_the_order_is_pinned_because_runs_are_continued_by_later_versions() -> None:
    assert data_of(6).order(0, 0, 6).tolist() == [2, 3, 4, 1, 0, 5]


def test_the_order_cannot_be_changed_through_its_result() -> None:
    data = data_of(9)
    before = data.order(1, 0, 9).clone()
    data.order(1, 0, 9).zero_()
    assert data.order(1, 0, 9).equal(before)


@given(labels=st.lists(st.integers(0, 4), min_size=10, max_size=60), n=st.integers(2, 5), seed=seeds)
def test_folds_hold_out_each_sample_once_and_spread_classes(labels: list[int], n: int, seed: int) -> None:
    y = torch.tensor(labels)
    data = Data.of((torch.zeros(len(y), 2), y))
    folds = data.folds(n, seed)
    assert len(folds) == n
    assert torch.cat([held for _, held in folds]).sort().values.equal(torch.arange(len(y)))
    for fit, held in folds:
        assert torch.cat([fit, held]).sort().values.equal(torch.arange(len(y)))
    assert max(len(h) for _, h in folds) - min(len(h) for _, h in folds) <= 1
    for c in range(5):
        counts = [int((y[held] == c).sum()) for _, held in folds]
        assert max(counts) - min(counts) <= 1


def test_folds_are_deterministic_and_depend_on_the_seed() -> None:
    data = Data.of({"x": torch.randn(40, 2)})  # no labels
    first, again, other = (data.folds(4, seed) for seed in (3, 3, 4))
    assert all(a.equal(b) for (_, a), (_, b) in zip(first, again, strict=True))
    assert not all(a.equal(b) for (_, a), (_, b) in zip(first, other, strict=True))


def test_too_little_data_for_folds() -> None:
    with pytest.raises(DataError, match=r"expected at least 8 samples for 4 folds, found 7"):
        data_of(7).folds(4, 0)
    with pytest.raises(DataError, match=r"expected at least 2 folds, found 1"):
        data_of(7).folds(1, 0)
