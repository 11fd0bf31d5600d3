"""Metrics against scikit-learn and scipy, and whether resampled intervals hold what they promise."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as reference
from torch import Tensor

from stockpot.task import METRICS, Metric, Scores, Task
from stockpot.task import scores as intervals
from stockpot.task.metrics import as_metric

SEEDS = st.integers(0, 2**32 - 1)


def value(name: str, outputs: Tensor, labels: Tensor) -> float:
    return scores(name, outputs, labels).value


def scores(name: str, outputs: Tensor, labels: Tensor) -> Scores:
    metric = METRICS[name]
    table = metric.statistics(outputs, (outputs, labels))
    return Scores(table.double(), metric)


def test_the_names() -> None:
    assert list(METRICS) == [
        "accuracy", "loss", "perplexity", "macro_f1", "micro_f1", "balanced_accuracy", "r2",
        "negative_mse", "negative_mae", "pearson", "spearman", "roc_auc", "nats_per_token", "bits_per_byte",
        "token_accuracy", "token_f1", "entity_f1", "multiple_choice", "multiple_choice_normalised", "exact_match",
    ]  # fmt: skip
    assert all(name == metric.name for name, metric in METRICS.items())
    assert [name for name, metric in METRICS.items() if metric.is_mean] == [
        "accuracy", "loss", "negative_mse", "negative_mae", "multiple_choice", "multiple_choice_normalised",
    ]  # fmt: skip


CLASSES: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": reference.accuracy_score,
    "macro_f1": lambda y, p: reference.f1_score(y, p, average="macro"),
    "micro_f1": lambda y, p: reference.f1_score(y, p, average="micro"),
    "balanced_accuracy": reference.balanced_accuracy_score,
}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.filterwarnings("ignore:A single label was found")
@given(seed=SEEDS, n=st.integers(1, 60), classes=st.integers(2, 6))
@settings(max_examples=40, deadline=None)
def test_classes_as_in_scikit_learn(name: str, seed: int, n: int, classes: int) -> None:
    """Also where some classes are never predicted, or never a label, or there is one only."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(size=(n, classes)))
    labels = torch.from_numpy(random.integers(0, random.integers(1, classes + 1), n))
    expected = CLASSES[name](labels.numpy(), logits.argmax(1).numpy())
    assert value(name, logits, labels) == pytest.approx(expected, abs=1e-12)


NUMBERS: dict[str, Callable[[Any, Any], float]] = {
    "r2": reference.r2_score,
    "negative_mse": lambda y, p: -reference.mean_squared_error(y, p),
    "negative_mae": lambda y, p: -reference.mean_absolute_error(y, p),
    "pearson": lambda y, p: stats.pearsonr(y, p).statistic,
    "spearman": lambda y, p: stats.spearmanr(y, p).statistic,
}


@pytest.mark.parametrize("name", NUMBERS)
@given(seed=SEEDS, n=st.integers(3, 60), ties=st.booleans(), offset=st.sampled_from([0.0, 1e4]))
@settings(max_examples=40, deadline=None)
def test_numbers_as_in_scikit_learn_and_scipy(name: str, seed: int, n: int, ties: bool, offset: float) -> None:
    random = np.random.default_rng(seed)
    y = random.normal(size=n)
    p = y + random.normal(size=n)
    if ties:
        y, p = y.round(), p.round()
        y[0], y[1], p[0], p[1] = 0, 1, 0, 1  # neither is constant
    y, p = y + offset, p + offset
    expected = NUMBERS[name](y, p)
    for shape in ((n,), (n, 1)):
        found = value(name, torch.from_numpy(p).reshape(shape), torch.from_numpy(y))
        assert found == pytest.approx(expected, abs=1e-9)


def test_several_outputs_are_averaged() -> None:
    random = np.random.default_rng(0)
    y = random.normal(size=(40, 3))
    p = y + random.normal(size=(40, 3)) * [0.1, 1, 2]
    outputs, targets = torch.from_numpy(p), torch.from_numpy(y)
    assert value("r2", outputs, targets) == pytest.approx(reference.r2_score(y, p), abs=1e-12)
    assert value("negative_mse", outputs, targets) == pytest.approx(-reference.mean_squared_error(y, p))
    each = [stats.pearsonr(y[:, d], p[:, d]).statistic for d in range(3)]
    assert value("pearson", outputs, targets) == pytest.approx(np.mean(each), abs=1e-12)
    each = [stats.spearmanr(y[:, d], p[:, d]).statistic for d in range(3)]
    assert value("spearman", outputs, targets) == pytest.approx(np.mean(each), abs=1e-12)


@given(seed=SEEDS, n=st.integers(2, 60), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_area_under_the_curve_as_in_scikit_learn(seed: int, n: int, ties: bool) -> None:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, n)
    labels[:2] = 0, 1
    score = random.normal(size=n)
    score = score.round() if ties else score
    expected = reference.roc_auc_score(labels, score)
    one, two = torch.from_numpy(score), torch.from_numpy(np.stack([np.zeros(n), score], axis=1))
    for outputs in (one, one[:, None], two):
        for target in (torch.from_numpy(labels), torch.from_numpy(labels).float()):
            assert value("roc_auc", outputs, target) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("average", ["macro", "micro"])
@pytest.mark.filterwarnings("ignore:F-score is ill-defined")
@given(seed=SEEDS, n=st.integers(2, 40), labels=st.integers(1, 5), kind=st.sampled_from([torch.float32, torch.int64]))
@settings(max_examples=40, deadline=None)
def test_several_labels_per_sample_as_in_scikit_learn(
    average: str, seed: int, n: int, labels: int, kind: torch.dtype
) -> None:
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(n, labels)), random.integers(0, 2, (n, labels))
    y[0] = 0  # which tells it from one class per sample, in whatever batch the row is
    data = (torch.from_numpy(x).float(), torch.from_numpy(y).to(kind))
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    task = Task(
        torch.nn.Identity(), data, loss=lambda m, b: bce(m(b[0]), b[1].float()), metric=f"{average}_f1", batch_size=7
    )
    expected = reference.f1_score(y if labels > 1 else y[:, 0], x > 0 if labels > 1 else x[:, 0] > 0,
                                  average=average if labels > 1 else "binary")  # fmt: skip
    scores = task.score()
    assert scores.value == pytest.approx(expected, abs=1e-12)
    assert scores.metric.name == f"{average}_f1"
    assert task.ensemble_scores(range(1)).value == pytest.approx(expected, abs=1e-12)


def test_loss_and_perplexity_of_classes() -> None:
    logits = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(20) % 3
    nats = reference.log_loss(labels.numpy(), logits.softmax(1).numpy())
    assert value("loss", logits, labels) == pytest.approx(-nats)
    assert value("perplexity", logits, labels) == pytest.approx(-math.exp(nats))


# Where a metric has no value, or nearly none


def test_constants() -> None:
    y, same = torch.randn(9, dtype=torch.float64), torch.full((9,), 0.1, dtype=torch.float64)
    for name in ("pearson", "spearman"):
        assert value(name, same, y) == 0  # a model that always says the same
        assert math.isnan(value(name, y, same))
    assert value("r2", y, same) == 0
    assert value("r2", same, same) == 1
    assert math.isnan(value("roc_auc", y, torch.ones(9)))
    assert value("roc_auc", same, torch.arange(9) % 2) == 0.5


def test_nan_is_never_a_good_score() -> None:
    y = torch.arange(9) % 3
    logits = torch.nn.functional.one_hot(y, 3).double()
    for name in CLASSES:
        assert value(name, logits, y) == 1
        assert value(name, torch.full_like(logits, math.nan), y) == 0
    broken = y.double()
    broken[4] = math.nan
    for name in NUMBERS:
        assert math.isnan(value(name, broken, y.double()))
    assert math.isnan(value("roc_auc", broken, y % 2))


def test_draws_without_a_value_are_left_out() -> None:
    """One positive in 30: a third of all draws lack it, and AUC with it."""
    table = torch.stack([torch.arange(30.0), (torch.arange(30) == 20).double()], dim=1).double()
    low, high = Scores(table, METRICS["roc_auc"]).interval()
    assert 0 <= low < 20 / 29 < high <= 1
    table[:, 1] = 0
    assert Scores(table, METRICS["roc_auc"]).interval() == (-math.inf, math.inf)


# Intervals


def test_resampling_is_repeatable_and_paired() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(200, generator=generator, dtype=torch.float64)
    noise = torch.randn(200, generator=generator, dtype=torch.float64)
    good, bad = (scores("spearman", y + k * noise, y) for k in (1.0, 1.1))
    assert good.interval() == good.interval()
    difference, low, high = good.difference(bad)
    assert difference == good.value - bad.value
    assert 0 < low < difference < high  # though the intervals overlap
    assert good.interval()[0] < bad.value
    assert good.difference(good) == (0, 0, 0)
    narrow, wide = (good.interval(confidence) for confidence in (0.5, 0.99))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.counted is not None])
def test_counting_samples_is_the_reduction_of_drawn_ones(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(4, (25, 2), generator=generator).double()
    table[:, 1] %= 2
    metric = METRICS[name]
    if metric.tokens:  # hits are among those predicted and those labelled
        table = torch.cat([table[:, 1:], table + 1], dim=1)
    assert metric.counted is not None
    rows = torch.randint(25, (50, 25), generator=generator)
    counts = torch.stack([torch.bincount(row, minlength=25) for row in rows]).double()
    each = torch.tensor([metric.reduce(table[row]) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(metric.counted(table)(counts), each, equal_nan=True)


@pytest.mark.parametrize("name", ["macro_f1", "pearson", "spearman", "roc_auc"])
def test_fifty_thousand_samples_take_less_than_a_second(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (50_000,), generator=generator).double()
    table = torch.stack([y + torch.randn(50_000, generator=generator), y], dim=1)
    found = Scores(table.round().clamp(0) if name == "macro_f1" else table, METRICS[name])
    began = time.process_time()
    low, high = found.interval()
    assert time.process_time() - began < 2  # 0.2 to 0.5 s where nothing else runs
    assert low < found.value < high


def test_few_samples_that_differ_are_chance_for_any_metric() -> None:
    """Five of five on one side may be chance (p = 0.06); resampling alone would call it certain."""
    labels = torch.arange(300) % 3
    table = torch.stack([labels, labels], dim=1).double()
    table[50:100, 0] = 0
    metric = METRICS["macro_f1"]
    for count in range(9):
        worse = table.clone()
        worse[:count, 0] = (worse[:count, 1] + 1) % 3
        difference, low, high = Scores(table, metric).difference(Scores(worse, metric))
        assert (low > 0) == (count > 5), count
        assert low <= difference <= high


def test_a_reduction_of_ones_own_may_fail_on_some_draws() -> None:
    """One positive in 30: scikit-learn refuses or warns about the third of all draws without it."""

    def reduce(table: Tensor) -> float:
        if not table[:, 1].any():
            raise ValueError("only one class")
        return float(reference.roc_auc_score(table[:, 1].numpy(), table[:, 0].numpy()))

    table = torch.stack([torch.arange(30.0), (torch.arange(30) == 20).double()], dim=1).double()
    own = Metric("own", lambda outputs, batch: outputs, reduce)
    assert Scores(table, own).interval() == pytest.approx(Scores(table, METRICS["roc_auc"]).interval())
    assert Scores(table, own).difference(Scores(table, own)) == (0, 0, 0)


def draw(kind: str, n: int, generator: torch.Generator) -> tuple[str, Tensor]:
    a, b = torch.randn(2, n, generator=generator, dtype=torch.float64)
    if kind == "roc_auc":
        labels = (torch.rand(n, generator=generator) < 0.4).double()
        return kind, torch.stack([a + labels, labels], dim=1)
    if kind == "perplexity":
        tokens = torch.randint(5, 50, (n,), generator=generator).double()
        return kind, torch.stack([tokens * (2 + 0.4 * a), tokens], dim=1)
    if kind == "pearson":
        return kind, torch.stack([a, 0.6 * a + 0.8 * b], dim=1)
    labels = torch.randint(3, (n,), generator=generator)
    wrong = torch.rand(n, generator=generator) < torch.tensor([0.1, 0.2, 0.4])[labels]
    return kind, torch.stack([torch.where(wrong, (labels + 1) % 3, labels), labels], dim=1).double()


@pytest.mark.parametrize("n", [50, 200])
@pytest.mark.parametrize("kind", ["roc_auc", "perplexity", "pearson", "macro_f1"])
@pytest.mark.parametrize("units", [4096, 40])
def test_resampled_intervals_hold_what_they_promise(
    kind: str, n: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn many times, about 95 % of the intervals hold the truth, also where groups of samples are drawn."""
    monkeypatch.setattr(intervals, "UNITS", units)
    generator = torch.Generator().manual_seed(0)
    truth = Scores(draw(kind, 400_000, generator)[1], METRICS[kind]).value
    held, draws = 0, 200
    for _ in range(draws):
        low, high = Scores(draw(kind, n, generator)[1], METRICS[kind]).interval()
        held += low <= truth <= high
    assert 0.91 <= held / draws <= 0.99


@pytest.mark.parametrize("kind", ["roc_auc", "macro_f1"])
def test_intervals_of_differences_hold_what_they_promise(kind: str) -> None:
    """Two models on the same samples, the second one worse on some of them."""

    def pair(n: int) -> tuple[Scores, Scores]:
        table = draw(kind, n, generator)[1]
        other = table.clone()
        if kind == "roc_auc":
            other[:, 0] += 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
        else:
            other[:, 0] = torch.where(torch.rand(n, generator=generator) < 0.1, 0.0, table[:, 0])
        return Scores(table, METRICS[kind]), Scores(other, METRICS[kind])

    generator = torch.Generator().manual_seed(0)
    one, other = pair(400_000)
    truth = one.value - other.value
    held, draws = 0, 200
    for _ in range(draws):
        one, other = pair(150)
        _, low, high = one.difference(other)
        held += low <= truth <= high
    assert 0.91 <= held / draws <= 0.99


def test_metrics_of_ones_own_have_the_name_of_what_was_given() -> None:
    class Distance:
        def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return outputs[:, 0] - labels

    def closeness(outputs: Tensor, labels: Tensor, scale: float) -> Tensor:
        return scale * (outputs[:, 0] - labels)

    assert as_metric(Distance()).name == "Distance"
    assert as_metric(functools.partial(closeness, scale=2.0)).name == "closeness"
    assert as_metric(lambda outputs, labels: outputs[:, 0]).name == "score"
