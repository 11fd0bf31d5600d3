"""Scores and their uncertainty."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stockpot.errors import TaskError
from stockpot.task import METRICS, Metric, Scores
from stockpot.task.metrics import as_metric
from stockpot.task.scores import bonett_price, student, worded

MEAN = as_metric(lambda outputs, batch: outputs)


def of(values: Tensor) -> Scores:
    return Scores(values[:, None], MEAN)


def scores(*values: float, metric: Metric = MEAN) -> Scores:
    return Scores(torch.tensor(values, dtype=torch.float64)[:, None], metric)


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


def test_students_interval_of_other_scores() -> None:
    found = scores(0.1, 0.4, 0.7, 0.2)
    error = torch.tensor([0.1, 0.4, 0.7, 0.2]).std().item() / 2
    half = 3.182446 * error  # the textbook's t for three degrees of freedom
    assert found.interval() == pytest.approx((0.35 - half, 0.35 + half), rel=0.01)
    lo, hi = found.interval(0.5)
    assert hi - lo < 2 * half / 2


@pytest.mark.parametrize(
    ("freedom", "wanted"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (29, 2.0452), (10**6, 1.95997)],
)
def test_students_distribution_as_in_the_tables(freedom: int, wanted: float) -> None:
    assert student(0.95, freedom) == pytest.approx(wanted, rel=0.01 if freedom == 3 else 2e-3)


def test_one_sample_says_nothing() -> None:
    assert scores(0.3).interval() == (-math.inf, math.inf)


def test_samples_without_weight_are_no_evidence() -> None:
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(0, 9, (6, 2), generator=generator).double() + torch.tensor([0.0, 1.0])
    metric = Metric("share", lambda outputs, batch: outputs, ratio=2.0)
    few, padded = (Scores(table, metric) for table in (some, torch.cat([some, torch.zeros(200, 2).double()])))
    assert padded.interval() == pytest.approx(few.interval())
    other = some.flip(0)
    found = Scores(torch.cat([other, torch.zeros(200, 2).double()]), metric)
    assert padded.difference(found) == pytest.approx(few.difference(Scores(other, metric)))


def test_paired_difference_is_narrower_than_the_intervals() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(100, generator=generator, dtype=torch.float64)
    better = base + 0.1 + 0.01 * torch.randn(100, generator=generator, dtype=torch.float64)
    mean, lo, hi = of(better).difference(of(base))
    delta = better - base
    assert mean == pytest.approx(float(delta.mean()))
    assert hi - mean == pytest.approx(1.984217 * float(delta.std()) / 10, rel=1e-5)  # t for 99
    assert 0.09 < lo < hi < 0.11


def paired(better: int, worse: int, n: int, confidence: float = 0.95) -> tuple[float, float, float]:
    first = torch.zeros(n, dtype=torch.float64)
    second = first.clone()
    first[:better] = 1
    second[better : better + worse] = 1
    return of(first).difference(of(second), confidence)


@pytest.mark.parametrize("n", [12, 100, 10_000])
def test_a_few_samples_that_changed_prove_nothing(n: int) -> None:
    """The sign test on the samples that differ says: five of five may be chance (p = 0.06), six of six not (0.03)."""
    for better in range(6):
        mean, lo, hi = paired(better, 0, n)
        assert mean == better / n
        assert lo <= 0 < hi, better
    assert paired(6, 0, n)[1] > 0
    assert paired(0, 6, n)[2] < 0
    assert paired(0, 5, n)[2] >= 0
    assert paired(9, 2, n)[1] <= 0  # p = 0.065
    assert paired(10, 2, n)[1] > 0  # p = 0.039


@pytest.mark.parametrize("better", range(7))
def test_nor_do_a_few_answers_or_groups(better: int) -> None:
    """Answers that were generated are right or wrong, and those beyond the budget are neither."""
    judged = torch.tensor([1.0] * 12 + [0.0] * 5, dtype=torch.float64)
    right = (torch.arange(17) < better).double()
    tables = [torch.stack([found, judged], dim=1) for found in (right, right * 0)]
    first, second = (Scores(table, METRICS["exact_match"]) for table in tables)
    assert first.difference(second) == pytest.approx(paired(better, 0, 12))
    values = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(40) // 2
    changed = values + (groups < better) * 0.2
    one, other = (Scores(each[:, None], MEAN, units=groups) for each in (changed, values))
    gap, low, _ = one.difference(other)
    assert gap == pytest.approx(better * 0.2 / 20)
    assert (low > 0) == (better > 5)


def test_two_samples_are_not_enough_for_any_claim() -> None:
    mean, lo, hi = paired(2, 0, 2)
    assert mean == 1.0
    assert lo < 0
    assert hi == 1.0


def test_on_much_data_the_interval_is_the_usual_one() -> None:
    mean, lo, hi = paired(400, 300, 10_000)
    error = math.sqrt((0.07 - 0.01**2) / 10_000)
    assert (lo, hi) == pytest.approx((mean - 1.959964 * error, mean + 1.959964 * error), abs=3e-5)


def test_more_confidence_asks_for_more() -> None:
    assert paired(6, 0, 100, 0.95)[1] > 0  # p = 0.031
    assert paired(6, 0, 100, 0.98)[1] <= 0
    assert paired(7, 0, 100, 0.98)[1] > 0  # p = 0.016
    mean, lo, hi = paired(400, 300, 10_000, 0.99)
    error = math.sqrt((0.07 - 0.01**2) / 10_000)
    assert (lo, hi) == pytest.approx((mean - 2.575829 * error, mean + 2.575829 * error), abs=3e-5)
    delta = torch.linspace(-1, 2, 100, dtype=torch.float64)
    mean, lo, hi = of(delta).difference(of(torch.zeros_like(delta)), 0.99)
    assert hi - mean == pytest.approx(2.626405 * float(delta.std()) / 10, rel=1e-4)  # t for 99


@pytest.mark.parametrize(("n", "up", "down"), [(20, 0.2, 0.2), (50, 0.1, 0.05), (300, 0.01, 0.01), (300, 0.03, 0.0)])
def test_intervals_hold_what_they_promise(n: int, up: float, down: float) -> None:
    """Drawn many times, at least about 95 % of the intervals hold the truth."""
    draws = torch.rand(4000, n, generator=torch.Generator().manual_seed(0))
    better, worse = (draws < up).sum(1), ((draws >= up) & (draws < up + down)).sum(1)
    held = 0
    for b, w in zip(better.tolist(), worse.tolist(), strict=True):
        lo, hi = bonett_price(b, w, n)
        held += lo <= up - down <= hi
    assert held / 4000 > 0.935


SIMULATED = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "interval_coverage.py"))


@pytest.mark.parametrize("name", SIMULATED["CASES"])
def test_intervals_of_every_kind_hold_the_truth(name: str) -> None:
    """Of 400 draws; the table of 2,000 in docs/metrics.md is the benchmark's own, to a standard error of 0.5 points."""
    assert 0.92 < SIMULATED["coverage"](name, 50, 400) < 0.98  # standard error 1.1 points


def test_words_say_the_uncertainty() -> None:
    assert (
        worded(scores(*[1.0] * 8, 0.0, 0.0, metric=METRICS["accuracy"]))
        == "80.00 % (95 % interval 49.02 to 94.33, n = 10)"
    )
    assert worded(scores(-0.5, -0.7, -0.6, metric=METRICS["loss"])) == "-0.6 (95 % interval -0.8484 to -0.3516, n = 3)"


def test_difference_needs_the_same_samples() -> None:
    with pytest.raises(TaskError, match=r"expected score of the same 2 samples, found score of 3 in the other"):
        scores(1.0, 0.0).difference(scores(1.0, 0.0, 1.0))


def test_confidence_is_a_probability() -> None:
    with pytest.raises(TaskError, match=r"expected a number between 0 and 1, found 95"):
        scores(1.0, 0.0).interval(95)


def test_only_a_mean_is_a_mean() -> None:
    with pytest.raises(TaskError, match=r"Metric 'sum': expected is_mean=True, .* found a reduction of its own"):
        Metric("sum", lambda outputs, batch: outputs, lambda table: float(table.sum()), is_mean=True)
    with pytest.raises(TaskError, match=r"found a ceiling without is_mean\.\n  Fix: leave out is_mean and ceiling"):
        Metric("best", lambda outputs, batch: outputs, ceiling=1.0)
