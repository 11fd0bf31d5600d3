"""The mixing weights themselves: what they are, what is refused, what is read off them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stockpot.errors import SoupError
from stockpot.soup import weights


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("W", "found"),
    [
        (matrix([0, 0], [1, 1], [0, 0]), 1),
        (matrix([1, 1]), 0),
        (matrix([1, 0], [0, 1]), None),  # one per group, not one
        (matrix([1, 0.5], [0, 0.5]), None),
        (matrix([0.5, 1], [0.5, 0]), None),
        (matrix([2, 2], [-1, -1]), None),
        (matrix([1, 2], [0, 0]), None),  # one ingredient, scaled
        (matrix([0, 0], [0, 0]), None),
        (matrix([1, 1], [0.5, 0], [-0.5, 0]), None),  # the others cancel, and are there all the same
    ],
)
def test_a_soup_of_one_ingredient_is_recognised(W: Tensor, found: int | None) -> None:
    assert weights.single(W) == found


def test_the_heaviest_ingredient_is_the_first_of_equals() -> None:
    assert weights.heaviest(matrix([0.2, 0.2], [0.4, 0.4], [0.4, 0.4])) == 1
    assert weights.heaviest(matrix([0.9, 0.0], [0.1, 1.0])) == 1
    assert weights.heaviest(matrix([-3.0], [1.0])) == 1


def test_columns_sum_to_one_or_are_refused() -> None:
    fine = matrix([0.5, 0.25], [0.5, 0.75])
    assert torch.equal(weights.check(fine, 2, 2), fine)
    off = matrix([0.5, 0.25], [0.5, 0.75 + 3e-6])
    with pytest.raises(SoupError, match="a column off by 3e-06"):
        weights.check(off, 2, 2)
    weights.check(matrix([0.5, 0.25], [0.5, 0.75 + 5e-7]), 2, 2)


def test_large_weights_that_cancel_are_rounded_in_proportion() -> None:
    weights.check(matrix([1000.0, 0.0], [-999.0 + 5e-4, 1.0]), 2, 2)
    with pytest.raises(SoupError, match="columns that sum to one"):
        weights.check(matrix([1000.0, 0.0], [-999.0 + 2e-3, 1.0]), 2, 2)
    with pytest.raises(SoupError, match="columns that sum to one"):
        weights.check(matrix([0.5], [0.5 + 1.5e-6]), 2, 1)


def test_uniform_and_chosen() -> None:
    assert weights.uniform(4, 2).tolist() == [[0.25, 0.25]] * 4
    assert weights.chosen(4, 1, [3, 1]).tolist() == [[0.0], [0.5], [0.0], [0.5]]


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (2,)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SoupError, match="a matrix of 2 ingredients x 2 groups"):
        weights.check(torch.full(shape, 0.5, dtype=torch.float64), 2, 2)


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(SoupError, match="found 1 NaN or Inf"):
        weights.check(matrix([float("nan")], [1.0]), 2, 1)
