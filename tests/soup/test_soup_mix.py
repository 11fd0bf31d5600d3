"""Which way a tensor is mixed, and that all ways give the same number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot.soup import weights as mix
from stockpot.soup.contents import AHEAD, THREADS, _ahead
from stockpot.soup.weights import GAIN, mix_tensor

PARTS = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([3.0, 5.0, -1.0]), torch.tensor([-4.0, 0.25, 8.0])]


def expected(weights: list[float]) -> Tensor:
    total = torch.zeros(3, dtype=torch.float64)
    for part, weight in zip(PARTS, weights, strict=True):
        total += weight * part.double()
    return total


@pytest.mark.parametrize(
    ("weights", "way"),
    [
        ([0.5, 0.25, 0.25], "mean"),
        ([1.0, -1.0, 1.0], "mean"),  # one after the other, the first two would cancel
        ([-0.25, 0.5, 0.75], "mean"),
        ([3.0, GAIN - 3.0, 1.0 - GAIN], "mean"),  # positive ones add up to exactly what is allowed
        ([3.5, GAIN - 3.4, 0.9 - GAIN], "differences"),
        ([3.0, 3.0, -5.0], "differences"),  # too much to take back
        ([-3.0, 2.0, 2.0], "differences"),  # the heaviest is negative
    ],
)
def test_the_way_depends_on_the_weights_and_the_number_does_not(
    monkeypatch: pytest.MonkeyPatch, weights: list[float], way: str
) -> None:
    taken: list[str] = []
    for name, function in (("mean", "_running_mean"), ("differences", "_extrapolate")):
        real = getattr(mix, function)

        def noted(*args: Any, name: str = name, real: Any = real) -> None:
            taken.append(name)
            real(*args)

        monkeypatch.setattr(mix, function, noted)
    found = mix_tensor(PARTS, weights)
    assert taken == [way]
    assert torch.allclose(found.double(), expected(weights), atol=1e-5)


@pytest.mark.parametrize(("size", "ahead"), [(1, THREADS + 1), (AHEAD // 2, 2), (3 * AHEAD, 1)])
def test_tensors_are_computed_only_a_few_ahead(size: int, ahead: int) -> None:
    """A soup of any size is built in the memory of a handful of its tensors."""

    begun: list[str] = []

    def make(name: str) -> Tensor:
        begun.append(name)
        return torch.zeros(1)

    names = [f"t{k}" for k in range(40)]
    values = _ahead(make, names, lambda name: size, THREADS)
    for taken in range(1, 31):
        next(values)
        assert len(begun) <= taken + ahead
    assert len(list(values)) == 10
    assert sorted(begun) == sorted(names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weights", [[0.5, 0.25, 0.25], [1.5, -0.25, -0.25], [-2.0, -1.0, 4.0]])
def test_how_many_threads_share_an_operation_changes_no_bit(
    dtype: torch.dtype, weights: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix, "WIDE", 3 * mix.CHUNK)
    size = 7 * mix.CHUNK + 13
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(3)]
    assert torch.equal(mix_tensor(parts, weights, wide=True), mix_tensor(parts, weights))


def test_negative_weights_come_last_however_small_the_others_are() -> None:
    parts = [torch.tensor([float(k + 1)]) for k in range(4)]
    found = mix_tensor(parts, [0.75, -0.75, 0.5, 0.5])  # in this order, the first two would cancel
    assert found.item() == pytest.approx(0.75 - 1.5 + 1.5 + 2.0)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [6.0, -2.5, -2.5]])
@pytest.mark.parametrize(
    ("given", "stored"), [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float16")]
)
def test_rounding_piece_by_piece_is_rounding_at_the_end(
    weights: list[float], given: str, stored: str, wide: bool
) -> None:
    draw, dtype = torch.Generator().manual_seed(0), getattr(torch, stored)
    for n in (0, 1, mix.CHUNK * mix.GROUP + 3, 3 * mix.CHUNK * mix.GROUP):
        parts = [torch.randn(n, generator=draw).to(getattr(torch, given)) for _ in range(3)]
        found = mix_tensor(parts, weights, dtype=dtype, wide=wide)
        assert found.dtype == dtype
        assert torch.equal(found, mix_tensor(parts, weights).to(dtype))
