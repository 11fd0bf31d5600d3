"""How long a method may take, what is said of it beforehand, and what an interruption leaves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot import Event, Soup, Task, cook
from stockpot.errors import MethodError
from stockpot.run.rebuild import rebuild_soup
from stockpot.soups.learn import TIMED, Learner
from stockpot.soups.registry import settings_for
from stockpot.soups.settings import steps_for
from zoo import fine_tunes, mlp, samples, weights_of, write, zoo

BRIEF: dict[str, Any] = {"steps": 60, "batch_size": 16, "lr": 0.1, "folds": 3}


def test_how_long_learning_takes_is_told_once(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 3))
    told: list[Event] = []
    cook(pool, Task(mlp(), samples(60)), "crossfit", listen=told.append, **BRIEF)
    paces = [event.data for event in told if event.kind == "pace"]
    assert len(paces) == 1
    before = [event.kind for event in told[: next(i for i, event in enumerate(told) if event.kind == "pace")]]
    assert before.count("step") > TIMED  # a single one says nothing
    assert 0 < paces[0]["steps"] < 3 * 60
    assert paces[0]["seconds"] > 0
    assert paces[0]["greedy"] > 0


@pytest.mark.parametrize("method", ["crossfit", "hl+"])
def test_a_budget_is_kept_and_the_best_so_far_is_returned(tmp_path: Path, method: str) -> None:
    pool, task = zoo(tmp_path, 4)
    settings: dict[str, Any] = {"batch_size": 1, "lr": 1e-4, "steps": 10**6}

    def slowly(event: Event) -> None:
        time.sleep(0.01 * (event.kind == "step"))

    result = cook(pool, task, method, budget=1.0, listen=slowly, **settings)
    assert result.seconds < 1.5
    taken = [h for h in result.history if h["kind"] == "step"]
    assert len(taken) >= 20
    assert (weights_of(result) - 0.25).abs().max() > 0
    assert "its budget of 1 s ended learning before it would have stopped" in result.notes


@pytest.mark.parametrize(("method", "options"), [("crossfit", {"folds": 3}), ("hl+", {}), ("mehl+", {"block_size": 2})])
def test_a_budget_in_samples_is_kept_and_gives_the_same_soup_every_time(
    tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    pool, task = zoo(tmp_path, 4)
    found = [cook(pool, task, method, batch_size=16, budget="1.5k samples", **options) for _ in range(2)]
    assert torch.equal(weights_of(found[0]), weights_of(found[1]))
    steps = [h for h in found[0].history if h["kind"] == "step"]
    assert 1500 - 6 * 16 < 16 * len(steps) <= 1500
    assert "its budget of 1.5k samples ended learning before it would have stopped" in found[0].notes


def test_batches_are_no_larger_than_what_a_fold_has(tmp_path: Path) -> None:
    settings = settings_for("crossfit", batch_size=128, budget="1000 samples")
    assert steps_for(settings, 75, 75, 75, 75) == 3  # 4 * 3 * 75 = 900
    assert steps_for(settings, 75, 75, 75, 75, blocks=2) == 1


def test_a_budget_that_no_step_fits_into_leaves_the_start(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    for method in ("crossfit", "hl+"):
        found = cook(pool, task, method, budget="10 samples", batch_size=16)
        assert not [h for h in found.history if h["kind"] == "step"]
        assert "its budget of 10 samples ended learning before it would have stopped" in found.notes


def test_samples_that_are_enough_change_nothing_and_are_not_named(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    settings: dict[str, Any] = {"batch_size": 16, "folds": 3}
    plain = cook(pool, task, "crossfit", **settings)
    taken = len([h for h in plain.history if h["kind"] == "step"])
    assert taken < 3 * 1000
    enough = cook(pool, task, "crossfit", budget=f"{16 * (taken + 3)} samples", **settings)
    assert torch.equal(weights_of(plain), weights_of(enough))
    assert plain.notes == enough.notes


def test_what_is_neither_seconds_nor_samples_is_refused() -> None:
    for budget in ("10min", "0 samples", "many samples"):
        with pytest.raises(MethodError) as caught:
            settings_for("crossfit", budget=budget)
        assert str(caught.value) == (
            f"setting budget: expected a number of seconds, or samples such as '200k samples', found {budget!r}.\n"
            "  Fix: give seconds as a number; 10min is understood in recipes."
        )


def test_a_budget_that_is_long_enough_changes_nothing(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    plain, limited = (cook(pool, task, "crossfit", **{**BRIEF, "budget": budget}) for budget in (None, 600.0))
    assert torch.equal(weights_of(plain), weights_of(limited))
    assert plain.notes == limited.notes


@pytest.mark.parametrize("method", ["crossfit", "hl+"])
def test_an_interruption_carries_the_best_so_far(tmp_path: Path, method: str) -> None:
    pool, task = zoo(tmp_path, 4)
    steps: list[Event] = []

    def listen(event: Event) -> None:
        steps.extend([event] * (event.kind == "step"))
        if len(steps) == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        cook(pool, task, method, listen=listen, batch_size=16, lr=0.02)
    best = caught.value.best  # type: ignore[attr-defined]
    assert isinstance(best, Soup)
    assert best.about["stopped"] == "interrupted"
    best.load_into(task.model)
    interrupted = task.score().loss
    Soup.uniform(pool).load_into(task.model)
    assert interrupted < task.score().loss


def test_a_soup_is_to_be_had_before_anything_is_learned_and_after_a_crash(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool", 4)
    told: list[Event] = []

    def crash(event: Event) -> None:
        told.append(event)
        if event.kind == "step":
            raise RuntimeError("the power is gone")

    with pytest.raises(RuntimeError, match="the power is gone"):
        cook(pool, task, "crossfit", run=tmp_path / "run", listen=crash, **BRIEF)
    (kept,) = (event for event in told if event.kind == "kept")
    assert Path(kept.data["record"]) == tmp_path / "run" / "methods" / "crossfit"
    place, _ = rebuild_soup(Path(kept.data["record"]), out=tmp_path / "soup")
    soup = Soup.load(place)
    assert soup.about["stopped"] == "before learning"
    share = 1 / kept.data["models"]
    assert set(soup.W.flatten().tolist()) <= {0.0, share}
    assert (soup.W.sum(dim=0) == 1).all()
    told.clear()
    went_on = cook(pool, task, "crossfit", run=tmp_path / "run", **BRIEF)
    assert went_on.soup is not None
    assert Soup.load(place).W.shape == went_on.soup.W.shape
    assert rebuild_soup(tmp_path / "run")[1]  # the record is the final soup's by now


def test_a_rank_that_has_no_fold_is_interrupted_as_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Learner._so_far

    def without_folds(self: Learner) -> Tensor:
        self._ranks.mine = []
        return known(self)

    def listen(event: Event) -> None:
        if event.kind == "step":
            raise KeyboardInterrupt

    monkeypatch.setattr(Learner, "_so_far", without_folds)
    pool, task = zoo(tmp_path, 4)
    with pytest.raises(KeyboardInterrupt) as caught:
        cook(pool, task, "crossfit", listen=listen, batch_size=16)
    assert isinstance(caught.value.best, Soup)  # type: ignore[attr-defined]
