"""Paired intervals against brute force: samples, and seeds, drawn again and again."""

from __future__ import annotations

import numpy as np
import pytest
from studies.paired import interval_over_samples as over_samples
from studies.paired import interval_over_seeds as over_seeds


def test_one_run_is_a_bootstrap_over_samples() -> None:
    random = np.random.default_rng(0)
    first, second = random.random(2000) < 0.80, random.random(2000) < 0.77
    delta = first.astype(np.float64) - second
    mean, low, high = over_samples(delta)
    drawn = delta[random.integers(0, 2000, (4000, 2000))].mean(axis=1)
    assert mean == pytest.approx(delta.mean())
    assert (low, high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.0015)


def test_pairing_matters() -> None:
    random = np.random.default_rng(1)
    first = (random.random(1000) < 0.8).astype(np.float64)
    second = first.copy()
    second[:5] = 1 - second[:5]
    _, low, high = over_samples(first - second)
    _, alone_low, alone_high = over_samples(first)
    assert high - low < 0.3 * (alone_high - alone_low)


def test_several_seeds_are_a_bootstrap_over_samples_and_seeds() -> None:
    random = np.random.default_rng(2)
    seeds, samples = 24, 300
    delta = (
        0.02
        + 0.30 * random.standard_normal((1, samples))
        + 0.02 * random.standard_normal((seeds, 1))
        + 0.20 * random.standard_normal((seeds, samples))
    )
    mean, low, high = over_seeds(delta)
    drawn = [
        delta[random.integers(0, seeds, seeds)][:, random.integers(0, samples, samples)].mean() for _ in range(3000)
    ]
    assert mean == pytest.approx(delta.mean())
    assert high - low == pytest.approx(np.subtract(*np.quantile(drawn, [0.975, 0.025])), rel=0.08)
    assert (low + high) / 2 == pytest.approx(mean)


def test_seeds_that_differ_widen_it() -> None:
    values = np.tile(np.random.default_rng(4).random((1, 500)), (3, 1))
    _, low, high = over_seeds(values)
    shifted = values + np.array([[-0.05], [0.0], [0.05]])
    _, wide_low, wide_high = over_seeds(shifted)
    assert wide_high - wide_low > 1.5 * (high - low)
    assert (low, high) == pytest.approx(over_samples(values[0])[1:])


@pytest.mark.parametrize("seeds", [2, 3, 10])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0, 3.0, 10.0])
def test_it_holds_the_truth_as_often_as_it_says(seeds: int, share: float) -> None:
    """`share`: what the seeds add to the error of a mean, over what the samples add."""
    random, draws, samples = np.random.default_rng(3), 2000, 50
    held = 0
    for _ in range(draws):
        by_sample = random.standard_normal((1, samples)) / 1.0
        by_seed = share * np.sqrt(seeds / samples) * random.standard_normal((seeds, 1))
        _, low, high = over_seeds(0.01 + by_sample + by_seed)
        held += low < 0.01 < high
    assert 0.93 <= held / draws <= 0.995
