"""Where held-out loss does not fall, steps get smaller; where it does, larger."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot import Task, cook
from stockpot.engine import Descent
from stockpot.engine.descent import Step
from stockpot.engine.trail import Trail
from stockpot.errors import MethodError
from stockpot.soups.best import Point
from stockpot.soups.settings import settings_for
from stockpot.soups.visit import SLOWEST, Visit
from zoo import zoo

BRIEF: dict[str, Any] = {"batch_size": 16, "lr": 0.1}


def history(folder: Path, method: str, **settings: Any) -> list[dict[str, Any]]:
    pool, task = zoo(folder, 5)
    return [dict(h) for h in cook(pool, task, method, **{**BRIEF, **settings}).history]


@pytest.mark.parametrize("advance", [1.0, 1.5])
def test_steps_get_smaller_where_held_out_loss_does_not_fall_and_larger_where_it_does(
    tmp_path: Path, advance: float
) -> None:
    told = history(
        tmp_path, "crossfit",
        folds=2, steps=60, evaluations=30, lr=2.0, schedule="constant", guard=False, advance=advance,
    )  # fmt: skip
    for fold in (0, 1):
        mine = [h for h in told if h.get("fold") == fold]
        rate, best, advances = 2.0, float("inf"), 0
        for now, after in pairwise(mine):
            if now["kind"] == "held_out":
                better = now["loss"] < best
                best = min(best, now["loss"])
                if now["step"] > 0:
                    rate *= advance if better else 0.5
                    advances += better
            if after["kind"] == "step":
                assert after["lr"] == pytest.approx(rate)
        assert mine[-1]["kind"] == "held_out"
        assert advances
        assert sum(h["kind"] == "step" for h in mine) < 60, "left at the best it has"
        assert rate * 0.5 <= 2.0 * SLOWEST < rate


@pytest.mark.parametrize("temperature", [False, True])
def test_judged_and_kept_is_the_mean_of_the_steps_since_the_last_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: bool
) -> None:
    """Also where the steps before were taken back."""
    taken: list[list[tuple[Tensor, float | None]]] = [[]]
    judged: list[Point] = []
    ends: list[Point] = []
    improved: list[bool] = []
    used: set[float | None] = set()
    step, judge, run, decide, loss = Descent._step, Visit._judged, Visit.run, Visit._judge, Task.loss

    def here(descent: Descent) -> tuple[Tensor, float | None]:
        factor = None if descent.temperature is None else float(descent.temperature.detach())
        return descent.raw.detach().clone(), factor

    def stepped(self: Descent, *args: Any) -> Step:
        found = step(self, *args)
        taken[-1].append(here(self))
        return found

    def judging(self: Visit, raw: Tensor, factor: float | None) -> Point:
        used.clear()
        judged.append(judge(self, raw, factor))
        taken.append([])
        assert used == {factor}
        return judged[-1]

    def decided(self: Visit) -> None:
        before = self.descent.raw.detach().clone()
        decide(self)
        if self.best is judged[-1]:  # steps go on from the last one
            improved.append(torch.equal(self.descent.raw, before))

    def losing(self: Task, *args: Any, **options: Any) -> Tensor:
        if not torch.is_grad_enabled():
            factor = options["temperature"]
            used.add(None if factor is None else float(factor))
        return loss(self, *args, **options)

    def running(self: Visit) -> Point:
        ends.append(run(self))
        return ends[-1]

    monkeypatch.setattr(Descent, "_step", stepped)
    monkeypatch.setattr(Visit, "_judged", judging)
    monkeypatch.setattr(Visit, "run", running)
    monkeypatch.setattr(Visit, "_judge", decided)
    monkeypatch.setattr(Task, "loss", losing)
    told = history(
        tmp_path, "crossfit",
        folds=2, steps=40, evaluations=8, lr=1.0, guard=False, smooth=True, temperature=temperature,
    )  # fmt: skip
    assert any(h["kind"] == "held_out" and h["step"] > 0 for h in told)
    windows = 0
    for steps, point in zip(taken, judged, strict=False):
        if not steps:
            continue  # the start of a fold
        windows += 1
        assert len(steps) == 5
        assert torch.allclose(point.raw, torch.stack([raw for raw, _ in steps]).mean(dim=0), atol=1e-6)
        if temperature:
            factors = [factor for _, factor in steps if factor is not None]
            assert point.temperature == pytest.approx(sum(factors) / 5, rel=1e-5)
    assert windows > 6
    assert improved
    assert all(improved)
    for end in ends:
        assert any(end is point for point in judged)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"retreat": True}, "setting retreat: expected False, or folds of at least 2"),
        ({"smooth": True}, "setting smooth: expected False, or folds of at least 2"),
        ({"advance": 0.9}, "setting advance: expected between 1 and 2"),
        ({"advance": 2.1}, "setting advance: expected between 1 and 2"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], text: str) -> None:
    with pytest.raises(MethodError, match=text):
        settings_for("hl+", **given)


def test_the_default_loads_what_fits_and_is_judged_often() -> None:
    default = settings_for("crossfit")
    assert (default.block_size, default.steps, default.evaluations, default.folds) == ("fit", 300, 30, 4)
    assert default.start == "own-greedy"
    assert (default.lr, default.retreat, default.smooth, default.guard) == (0.02, True, True, True)
    assert SLOWEST == 1 / 16


def test_a_mean_is_of_the_steps_taken_and_stays_what_it_was() -> None:
    raw, factor = torch.tensor([[1.0, 2.0]]), torch.tensor(3.0)
    trail = Trail(raw, factor)
    found, temperature = trail.mean()  # of no step: what there is
    assert (found.tolist(), temperature) == ([[1.0, 2.0]], 3.0)
    raw.add_(1)
    assert found.tolist() == [[1.0, 2.0]]
    trail.add()
    raw.add_(2)
    trail.add(torch.tensor(0.0))
    raw.fill_(float("nan"))
    trail.add(torch.tensor(1.0))  # skipped, as a captured step knows it
    found, temperature = trail.mean()
    assert (found.tolist(), temperature) == ([[3.0, 4.0]], 3.0)
    trail.begin()
    raw.fill_(5.0)
    trail.add()
    assert trail.mean()[0].tolist() == [[5.0, 5.0]]


def test_a_skipped_step_is_not_in_the_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []
    add, step = Trail.add, Descent._step
    skipped: list[bool] = []

    def stepped(self: Descent, *args: Any) -> Step:
        skipped.append(step(self, *args).skipped)
        return Step(0.0, skipped[-1])

    def adding(self: Trail, *args: Any) -> None:
        added.append(len(skipped))
        add(self, *args)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return found * float("nan") if torch.is_grad_enabled() and len(skipped) in (2, 5) else found

    monkeypatch.setattr(Trail, "add", adding)
    monkeypatch.setattr(Descent, "_step", stepped)
    pool, task = zoo(tmp_path, 4)
    cook(
        pool, Task(task.model, task.fit, loss=loss), "crossfit", folds=2, steps=10, evaluations=2, guard=False
    )
    assert [place for place, one in enumerate(skipped) if one] == [2, 5]
    assert added == [place for place, one in enumerate(skipped) if not one]
