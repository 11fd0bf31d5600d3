"""Scores and their uncertainty."""

from __future__ import annotations

import math

import pytest
import torch

from stockpot.errors import TaskError
from stockpot.task import Scores


def scores(*values: float, batches: tuple[int, ...] | None = None) -> Scores:
    return Scores(torch.tensor(values, dtype=torch.float64), batches=batches)


def test_wilson_interval_of_right_and_wrong() -> None:
    # Textbook value: 8 of 10 at 95 %.
    lo, hi = scores(*[1.0] * 8, 0.0, 0.0).interval()
    assert (lo, hi) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)


def test_wilson_interval_stays_a_probability() -> None:
    lo, hi = scores(1.0, 1.0, 1.0).interval()
    assert hi == 1.0
    assert 0.4 < lo < 0.5
    lo, hi = scores(0.0, 0.0, 0.0).interval()
    assert lo == 0.0
    assert 0.5 < hi < 0.6


def test_normal_interval_of_other_scores() -> None:
    found = scores(0.1, 0.4, 0.7, 0.2)
    half = 1.959964 * torch.tensor([0.1, 0.4, 0.7, 0.2]).std().item() / 2
    assert found.interval() == pytest.approx((0.35 - half, 0.35 + half), abs=1e-6)
    assert found.standard_error == pytest.approx(half / 1.959964, abs=1e-6)
    lo, hi = found.interval(0.5)
    assert hi - lo < 2 * half / 2


def test_a_mean_repeated_over_its_batch_is_one_observation() -> None:
    plain = scores(0.1, 0.4, 0.7)
    repeated = scores(*[0.1] * 5, *[0.4] * 5, *[0.7] * 5, batches=(5, 5, 5))
    assert repeated.standard_error == pytest.approx(plain.standard_error)
    assert scores(*[1.0] * 5, batches=(5,)).interval() == (-math.inf, math.inf)


def test_paired_difference_is_narrower_than_the_intervals() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(100, generator=generator, dtype=torch.float64)
    better = base + 0.1 + 0.01 * torch.randn(100, generator=generator, dtype=torch.float64)
    mean, lo, hi = Scores(better).difference(Scores(base))
    delta = better - base
    assert mean == pytest.approx(float(delta.mean()))
    assert hi - mean == pytest.approx(1.959964 * float(delta.std()) / 10, rel=1e-6)
    assert 0.09 < lo < hi < 0.11


def test_difference_needs_the_same_samples() -> None:
    with pytest.raises(TaskError, match=r"expected scores of the same 2 samples, found 3 in the other"):
        scores(1.0, 0.0).difference(scores(1.0, 0.0, 1.0))


def test_confidence_is_a_probability() -> None:
    with pytest.raises(TaskError, match=r"expected a number between 0 and 1, found 95"):
        scores(1.0, 0.0).interval(95)
