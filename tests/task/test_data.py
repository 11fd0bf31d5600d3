"""Whatever the user has becomes the same data, read once."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stockpot.errors import DataError
from stockpot.events import Event
from stockpot.task import Data

X = torch.arange(150 * 4, dtype=torch.uint8).reshape(150, 4)
Y = torch.arange(150) % 7
ALL = torch.arange(150)


class Pairs(Dataset[tuple[Tensor, int]]):
    """Counts how often each sample is decoded."""

    def __init__(self, n: int = 150) -> None:
        self.n = n
        self.reads = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return X[index], int(Y[index])


class Texts(Dataset[dict[str, Any]]):
    """Token ids of uneven length."""

    lengths = tuple(3 + (7 * i) % 11 for i in range(150))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.full((self.lengths[index],), index), "label": index % 3}


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((X[i], int(Y[i])) for i in range(150))


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(sample["ids"]) for sample in samples)
    ids = [torch.nn.functional.pad(s["ids"], (0, longest - len(s["ids"])), value=-1) for s in samples]
    return {"ids": torch.stack(ids), "labels": torch.tensor([s["label"] for s in samples])}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    return iter([(X[i : i + 40], Y[i : i + 40]) for i in range(0, 150, 40)])


@pytest.mark.parametrize(
    "source",
    [
        pytest.param((X, Y), id="tuple"),
        pytest.param([X, Y], id="list"),
        pytest.param((X.numpy(), Y.numpy()), id="arrays"),
        pytest.param(TensorDataset(X, Y), id="TensorDataset"),
        pytest.param(Pairs(), id="Dataset"),
        pytest.param([(X[i], int(Y[i])) for i in range(150)], id="list of samples"),
        pytest.param(DataLoader(Pairs(), batch_size=7, shuffle=True, drop_last=True), id="DataLoader"),
        pytest.param(DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True), id="tensor DataLoader"),
        pytest.param(DataLoader(TensorDataset(X, Y), batch_size=None), id="DataLoader without batching"),
        pytest.param(DataLoader(Stream(), batch_size=7), id="DataLoader of a stream"),
        pytest.param(Stream(), id="IterableDataset"),
        pytest.param(batches(), id="iterator of batches"),
        pytest.param(list(batches()), id="list of batches"),
    ],
)
def test_all_sources_give_the_same_data(source: Any) -> None:
    if isinstance(source, DataLoader) and source.batch_size is None:
        source = DataLoader(TensorDataset(X.reshape(15, 10, 4), Y.reshape(15, 10)), batch_size=None, shuffle=True)
    data = Data.of(source)
    x, y = data.batch(ALL)
    assert len(data) == 150
    assert x.equal(X)
    assert x.dtype == torch.uint8  # kept small
    assert y.equal(Y)
    assert data.labels is not None
    assert data.labels.equal(Y)
    assert data.nbytes == X.nbytes + Y.nbytes
    some = torch.tensor([140, 3, 3])
    assert data.batch(some)[0].equal(X[some])


def test_a_dataset_is_decoded_once() -> None:
    dataset = Pairs()
    data = Data.of(DataLoader(dataset, batch_size=32))
    after_reading = dataset.reads
    for step in range(20):
        data.batch(data.order(0, step, 32))
    assert dataset.reads == after_reading <= 150 + 8  # and at most a few to look at


def test_a_dict_and_a_nested_tree_keep_their_shape() -> None:
    data = Data.of({"a": X, "b": (Y, {"c": X.float()})})
    batch = data.batch(torch.tensor([2, 1]))
    assert list(batch) == ["a", "b"]
    assert batch["b"][1]["c"].equal(X[[2, 1]].float())


def test_a_batch_encoding_keeps_its_type() -> None:
    class Encoding(UserDict[str, Tensor]):
        def __getattr__(self, name: str) -> Tensor:
            if name == "data":
                raise AttributeError(name)
            return self.data[name]

    source = Encoding(input_ids=X.long(), labels=Y)
    data = Data.of(source)
    assert data.batch(torch.tensor([5])).input_ids.equal(X[5:6].long())
    assert source.input_ids.shape == (150, 4)  # the user's own object is left alone
    assert data.labels is not None


def test_uneven_samples_are_padded_per_batch_by_the_loaders_collate_fn() -> None:
    data = Data.of(DataLoader(Texts(), batch_size=16, shuffle=True, collate_fn=pad))
    short = torch.tensor([i for i, n in enumerate(Texts.lengths) if n == 3][:4])
    batch = data.batch(short)
    assert batch["ids"].shape == (4, 3)  # not padded to the longest text of all
    assert batch["ids"][:, 0].equal(short)
    assert data.labels is not None
    assert data.labels.equal(ALL % 3)
    assert data.nbytes >= sum(8 * n for n in Texts.lengths)


def test_samples_uneven_only_later_are_still_collated_per_batch() -> None:
    class Late(Texts):
        lengths = (5,) * 100 + (9,) * 50

    data = Data.of(DataLoader(Late(), collate_fn=pad))
    assert data.batch(torch.arange(4))["ids"].shape == (4, 5)
    assert data.batch(torch.tensor([0, 149]))["ids"].shape == (2, 9)


def test_a_collate_fn_that_mixes_samples_is_called_for_each_batch() -> None:
    def centred(samples: list[tuple[Tensor, int]]) -> Tensor:
        x = torch.stack([sample[0] for sample in samples]).float()
        return x - x.mean(0)

    data = Data.of(DataLoader(Pairs(), collate_fn=centred))
    assert data.batch(torch.tensor([7])).equal(torch.zeros(1, 4))


def test_a_subset_is_a_view() -> None:
    data = Data.of((X, Y))
    view = data.subset(torch.tensor([9, 8, 7, 6])).subset(torch.tensor([1, 3]))
    assert len(view) == 2
    assert view.batch(torch.tensor([0, 1]))[0].equal(X[[8, 6]])
    assert view.labels is not None
    assert view.labels.equal(Y[[8, 6]])
    assert view._store is data._store
    with pytest.raises(DataError, match="subset of data: expected at least one sample, found none"):
        data.subset(torch.tensor([]))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ((X, Y.float()), None),
        ((X, Y.unsqueeze(1)), None),
        ((X, Y, Y), None),
        ((X, Y > 3), None),
        ({"x": X, "target": Y.int()}, Y),
        ({"y": Y, "labels": 6 - Y}, 6 - Y),
    ],
)
def test_labels_are_found_or_not(source: Any, expected: Tensor | None) -> None:
    found = Data.of(source).labels
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.equal(expected)


def test_the_samplers_choice_counts_but_not_its_order() -> None:
    loader = DataLoader(Pairs(), sampler=SubsetRandomSampler([20, 4, 11]))
    assert Data.of(loader).batch(torch.arange(3))[0].equal(X[[4, 11, 20]])
    loader = DataLoader(Pairs(), batch_sampler=[[5, 1], [3]])
    assert Data.of(loader).batch(torch.arange(3))[0].equal(X[[1, 3, 5]])
    repeating = WeightedRandomSampler([1.0, 1.0, 0.0], num_samples=50)
    with pytest.raises(DataError, match=r"sampler WeightedRandomSampler: expected each sample at most once"):
        Data.of(DataLoader(Pairs(3), sampler=repeating))


def test_workers_read_the_same_data() -> None:
    assert Data.of(DataLoader(Pairs(), num_workers=1)).batch(ALL)[0].equal(X)


def test_random_transforms_are_frozen_and_the_callers_random_state_is_left_alone() -> None:
    class Noisy(Pairs):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return X[index] + torch.randn(4), int(Y[index])

    first = Data.of(Noisy())
    torch.manual_seed(torch.initial_seed() + 1)
    before = torch.get_rng_state()
    second = Data.of(Noisy())
    assert torch.get_rng_state().equal(before)
    assert first.batch(ALL)[0].equal(second.batch(ALL)[0])
    assert first.batch(ALL)[0].equal(first.batch(ALL)[0])


def test_reading_reports_progress() -> None:
    events: list[Event] = []
    Data.of(Pairs(), name="fit data", listen=events.append)
    assert [event.data["done"] for event in events] == [64, 128, 150]
    assert events[0].data == {"what": "fit data", "done": 64, "total": 150, "unit": "samples"}


@pytest.mark.parametrize("empty", [(X[:0], Y[:0]), Pairs(0), [], iter([]), DataLoader(Pairs(0)), [(X[:0], Y[:0])]])
def test_empty_data(empty: Any) -> None:
    with pytest.raises(DataError, match=r"fit data: expected at least one sample, found none") as caught:
        Data.of(empty, name="fit data")
    assert "Fix: check the path, split or filter" in str(caught.value)


class Large(Pairs):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.zeros(1024, dtype=torch.uint8), 0


def test_data_over_the_limit_is_refused_after_the_first_samples() -> None:
    dataset = Large(100_000)
    expected = r"fit data: expected at most 1 MiB in memory, found about 98\.\d+ MiB"
    with pytest.raises(DataError, match=expected) as caught:
        Data.of(dataset, name="fit data", memory_limit=2**20)
    assert "Fix: raise memory_limit (bytes), give fewer samples" in str(caught.value)
    assert dataset.reads <= 200


def test_uneven_data_over_the_limit_is_refused_early() -> None:
    class Long(Texts):
        lengths = tuple(1000 + i % 97 for i in range(10_000))
        reads = 0

        def __getitem__(self, index: int) -> dict[str, Any]:
            type(self).reads += 1
            return super().__getitem__(index)

    with pytest.raises(DataError, match=r"data: expected at most 1 MiB in memory, found about \d\d\.\d+ MiB"):
        Data.of(DataLoader(Long(), collate_fn=pad), memory_limit=2**20)
    assert Long.reads <= 200


def test_iterables_over_the_limit_are_refused_on_the_way() -> None:
    made = 0

    def endless() -> Iterator[Tensor]:
        nonlocal made
        while True:
            made += 1
            yield torch.zeros(64, 1024, dtype=torch.uint8)

    with pytest.raises(DataError, match=r"expected at most 1 MiB in memory, found 1\.062 MiB"):
        Data.of(endless(), memory_limit=2**20)
    assert made == 17
    with pytest.raises(DataError, match=r"found about 6\.\d+ MiB"):
        Data.of([(torch.zeros(64, 1024, dtype=torch.uint8),)] * 100, memory_limit=2**20)
    with pytest.raises(DataError, match=r"expected at most 100 B in memory, found 1\.758 KiB"):
        Data.of((X, Y), memory_limit=100)


def test_batches_of_uneven_length_are_refused_with_the_way_out() -> None:
    with pytest.raises(DataError) as caught:
        Data.of(iter([(torch.zeros(4, 7), Y[:4]), (torch.zeros(4, 9), Y[:4])]), name="fit data")
    assert str(caught.value) == (
        "fit data, batch[0]: expected (7,) float32 per sample as in the first batch, "
        "found (9,) float32 per sample in batch 1.\n"
        "  Fix: pad all samples to one length, or give a DataLoader over a map-style Dataset "
        "with a collate_fn that pads."
    )
    with pytest.raises(DataError, match=r"expected the parts \['a'\] as in the first batch"):
        Data.of([{"a": X}, {"b": X}])


def test_samples_that_do_not_stack_are_refused() -> None:
    with pytest.raises(DataError, match=r"samples that do not stack .*equal size") as caught:
        Data.of(Texts())
    assert "give a DataLoader with a collate_fn" in str(caught.value)

    class Sorted(Texts):
        lengths = (5,) * 64 + (9,) * 86  # each chunk stacks by itself

    with pytest.raises(DataError, match=r"\['ids'\]: expected \(5,\) int64 .* found \(9,\) int64"):
        Data.of(Sorted())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((X, Y[:-1]), r"data: expected the same number of rows in every tensor, found \[0\]: 150, \[1\]: 149"),
        ((X, torch.tensor(3)), r"data\[1\]: expected a tensor with one row per sample, found a tensor without"),
        ({"x": X, "n": "abc"}, r"data\['n'\]: expected a tensor with one row per sample, found str"),
        ({}, r"data: expected at least one tensor, found none"),
        (3, r"data: expected tensors, a Dataset, a DataLoader, or an iterable of batches, found int"),
        ("folder", r"an iterable of batches, found str"),
        (iter(["a"]), r"a batch of data: expected a tensor with one row per sample, found str"),
    ],
)
def test_what_is_no_data(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Data.of(source)


def test_an_array_that_cannot_be_written_is_copied() -> None:
    frozen = np.arange(6.0)
    frozen.flags.writeable = False
    assert Data.of((frozen,)).batch(torch.tensor([5]))[0].tolist() == [5.0]
