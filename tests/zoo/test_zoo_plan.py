"""Claims about what a search will do: pure functions of the seed, and values that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockpot.errors import MethodError
from stockpot.zoo.plan import SPACES, Augmentation, Plan, Probe, Trial, draw, draw_trials


@given(
    low=st.floats(1e-6, 1.0), factor=st.floats(1, 1000), scale=st.sampled_from(["log", "linear"]), seed=st.integers()
)
def test_draws_stay_inside_their_range(low: float, factor: float, scale: str, seed: int) -> None:
    space = {"min": low, "max": low * factor, "scale": scale}
    values = [draw(space, "lr", seed=seed, number=n) for n in range(20)]
    assert all(low <= value <= low * factor for value in values)


def test_a_log_range_gives_every_decade_its_share() -> None:
    space = {"min": 1e-6, "max": 1.0, "scale": "log"}
    values = [draw(space, "lr", seed=0, number=n) for n in range(3000)]
    low = sum(value < 1e-3 for value in values)
    assert 1350 < low < 1650


def test_whole_numbers_reach_both_ends() -> None:
    space = {"min": 3, "max": 6}
    assert {draw(space, "seed", seed=0, number=n, whole=True) for n in range(100)} == {3, 4, 5, 6}


def test_a_trial_depends_on_its_seed_and_number_alone() -> None:
    assert draw_trials(12, seed=5)[:4] == draw_trials(4, seed=5)
    assert draw_trials(4, seed=5) != draw_trials(4, seed=6)
    assert len({trial.lr for trial in draw_trials(12)}) == 12


def test_searching_one_thing_differently_changes_no_other() -> None:
    usual, changed = draw_trials(5), draw_trials(5, spaces={"epochs": [1, 2], "augmentation": 0.5})
    for before, after in zip(usual, changed, strict=True):
        assert after.augmentation == 0.5
        assert (before.lr, before.weight_decay, before.seed) == (after.lr, after.weight_decay, after.seed)


def test_listed_trials_keep_their_values_and_draw_the_rest() -> None:
    drawn = draw_trials(2, seed=3)
    listed = draw_trials(seed=3, listed=[{"lr": 0.5, "seed": 7}, {}])
    assert (listed[0].lr, listed[0].seed, listed[0].epochs) == (0.5, 7, drawn[0].epochs)
    assert listed[1] == drawn[1]


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ([], "space of lr: expected at least one choice, found an empty list"),
        ({}, "space of lr: expected a range with min, max and perhaps scale, found an empty mapping"),
        ({"min": 1, "max": 2, "step": 1}, "found min, max, step"),
        ({"min": 2, "max": 1}, "expected min <= max, found 2 > 1"),
        ({"min": 0, "max": 1, "scale": "log"}, "expected min > 0 for a log range, found 0"),
        ({"min": 1, "max": 2, "scale": "cubic"}, "expected scale 'log' or 'linear', found 'cubic'"),
        (["a"], "space of lr: expected a number of at least 0, found 'a'"),
        (float("nan"), "expected a number of at least 0, found nan"),
        (True, "expected a number of at least 0, found True"),
        (-1e-3, "expected a number of at least 0, found -0.001"),
        (0, "setting lr: expected more than 0, found 0"),
    ],
)
def test_impossible_spaces_are_refused(space: Any, said: str) -> None:
    with pytest.raises(MethodError) as caught:
        draw_trials(3, spaces={"lr": space})
    assert said in str(caught.value)


def test_an_unknown_setting_gets_the_nearest_name() -> None:
    with pytest.raises(MethodError, match="'learning_rate': expected one of augmentation, epochs, label_smoothing, lr"):
        draw_trials(3, spaces={"learning_rate": 1.0})
    with pytest.raises(MethodError, match="did you mean 'weight_decay'"):
        draw_trials(listed=[{"weight_deacy": 1.0}])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Plan(()), "trials: expected at least one trial"),
        (lambda: draw_trials(0), "trials: expected at least one trial, found 0"),
        (lambda: Trial(lr=0.0), "lr: expected more than 0, found 0.0"),
        (lambda: Trial(lr=float("inf")), "lr: expected more than 0, found inf"),
        (lambda: Trial(lr=1.0, epochs=0), "epochs: expected more than 0"),
        (lambda: Trial(lr=1.0, weight_decay=-1), "weight_decay: expected at least 0"),
        (lambda: Trial(lr=1.0, label_smoothing=1.1), "label_smoothing: expected at least 0 and at most 1"),
        (lambda: Trial(lr=1.0, augmentation=1.5), "augmentation: expected at least 0 and at most 1, found 1.5"),
        (lambda: Plan((Trial(1.0),), batch_size=0), "batch_size: expected at least 1"),
        (lambda: Plan((Trial(1.0),), warmup=1.1), "warmup: expected at least 0 and at most 1"),
        (lambda: Plan((Trial(1.0),), clip=0.0), "clip: expected more than 0"),
        (lambda: Plan((Trial(1.0),), optimizer="adam"), "optimizer 'adam': expected one of adamw, sgd"),  # type: ignore[arg-type]
        (lambda: Probe(lr=-1.0), "lr: expected more than 0"),
        (lambda: Probe(weight_decay=-1.0), "weight_decay: expected at least 0"),
        (lambda: Augmentation(mixup=-0.1), "mixup: expected at least 0"),
        (lambda: draw_trials(listed=[{"seed": 0.5}]), "seed: expected a whole number, found 0.5"),
        (lambda: draw_trials(3, listed=[{}]), "expected 3 listed trials, found 1"),
    ],
)
def test_impossible_values_are_refused(make: Any, said: str) -> None:
    with pytest.raises(MethodError) as caught:
        make()
    assert said in str(caught.value)


def test_every_trial_setting_is_searched_by_default() -> None:
    assert set(SPACES) == set(Trial.__dataclass_fields__)
