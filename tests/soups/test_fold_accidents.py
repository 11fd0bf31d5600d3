"""What may happen to folds on the way: memory that runs out late, losses that are not finite, pieces of a batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot import Event, Task, cook
from stockpot.engine import Engine
from stockpot.errors import LearningError
from stockpot.soups import learn
from stockpot.soups.fold import Fold
from stockpot.soups.learn import Learner
from stockpot.soups.problem import Problem
from stockpot.task import Scores
from zoo import fine_tunes, mlp, normed, samples, weights_of, write

BRIEF: dict[str, Any] = {"steps": 20, "batch_size": 16}


def doubles(number: int) -> list[dict[str, Tensor]]:
    return [{name: value.double() for name, value in state.items()} for state in fine_tunes(mlp, number)]


def test_memory_that_runs_out_while_folds_are_judged_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 5)), Task(mlp(), samples())
    wanted = cook(pool, task, "hl+", folds=4, **BRIEF)
    score, calls = Problem.score_live, []

    def short(self: Problem, *args: Any, **options: Any) -> Scores:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        return score(self, *args, **options)

    monkeypatch.setattr(Problem, "score_live", short)
    found = cook(pool, task, "hl+", folds=4, **BRIEF)
    assert len(calls) > 4
    assert torch.equal(weights_of(found), weights_of(wanted))
    assert found.held_out is not None
    assert wanted.held_out is not None
    assert (found.held_out.table - wanted.held_out.table).abs().max() < 1e-6


def test_a_pool_whose_blocks_memory_cuts_may_be_permuted_too(tmp_path: Path) -> None:
    states, order = doubles(5), [3, 0, 4, 2, 1]
    task = Task(mlp().double(), samples(dtype=torch.float64))
    size = sum(value.numel() for value in states[0].values()) * 8
    told: list[Event] = []
    options = {**BRIEF, "memory": 9 * size}
    plain = cook(write(tmp_path / "plain", states), task, "crossfit", listen=told.append, **options)
    mixed = cook(write(tmp_path / "mixed", [states[k] for k in order]), task, "crossfit", **options)
    assert len({tuple(event.data["models"]) for event in told if event.kind == "block"}) > 1  # it was cut
    assert (weights_of(plain)[order] - weights_of(mixed)).abs().max() <= 1e-8


class BadSlope(torch.autograd.Function):
    """The identity, with a slope that is not a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return slopes[0] * math.nan


def test_folds_in_which_every_step_is_skipped_are_no_success(tmp_path: Path) -> None:
    begun: list[Event] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs = BadSlope.apply(model(batch[0])) if begun else model(batch[0])  # type: ignore[no-untyped-call]
        return nn.functional.cross_entropy(outputs, batch[1], reduction="none")

    def listen(event: Event) -> None:
        if event.kind == "plan":
            begun.append(event)

    pool = write(tmp_path, fine_tunes(mlp, 5))
    with pytest.raises(LearningError, match=r"found (\d+) of \1 skipped"):
        cook(pool, Task(mlp(), samples(), loss=loss), "crossfit", batch_size=16, listen=listen)


def test_a_loss_that_is_nan_at_the_start_does_not_freeze_its_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = Engine.loss_on, []

    def loss_on(self: Engine, *args: Any) -> float:
        calls.append(1)
        return math.nan if len(calls) == 1 else measure(self, *args)

    folds: list[Fold] = []
    run = Learner.run

    def watched(self: Learner) -> None:
        folds[:] = self.folds
        run(self)

    monkeypatch.setattr(Engine, "loss_on", loss_on)
    monkeypatch.setattr(Learner, "run", watched)
    pool = write(tmp_path, fine_tunes(mlp, 5))
    found = cook(pool, Task(mlp(), samples()), "hl+", folds=2, steps=60, batch_size=16, lr=0.02)
    first = [h["step"] for h in found.history if h["kind"] == "held_out" and h["fold"] == 0]
    assert len(first) > 3  # nothing is less than NaN: it gave up after two judgements
    assert folds[0].unseen[1].any()  # the guard does not score the start


def test_an_engine_that_ran_out_of_memory_keeps_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []

    class Watched(Engine):
        def __init__(self, *args: Any, **options: Any) -> None:
            assert not any(hasattr(engine, "loader") or hasattr(engine, "fixed") for engine in engines)
            super().__init__(*args, **options)
            engines.append(self)

        def gradient(self, *args: Any) -> Any:
            if len(engines) == 1:
                raise torch.OutOfMemoryError("no memory")
            return super().gradient(*args)

    monkeypatch.setattr(learn, "Engine", Watched)
    cook(write(tmp_path, fine_tunes(mlp, 6)), Task(mlp(), samples()), "hl+", **BRIEF)
    assert len(engines) == 2


def test_batches_of_a_network_with_batch_normalisation_are_not_cut_unasked(tmp_path: Path) -> None:
    pool, task = write(tmp_path, fine_tunes(normed, 4)), Task(normed(), samples())
    assert not task.may_be_cut
    assert Task(mlp(), samples()).may_be_cut
    found = cook(pool, task, "hl+", accumulate=2, **BRIEF)
    assert any("accumulate changes what is learned" in note for note in found.notes)
