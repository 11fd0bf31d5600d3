"""Where held-out loss does not fall, steps get smaller; where it does, larger."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot import cook
from stockpot.engine import Descent
from stockpot.engine.descent import Step
from stockpot.errors import MethodError
from stockpot.methods.best import Point
from stockpot.methods.settings import settings_for
from stockpot.methods.visit import SLOWEST, Visit
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
    step, judge, run = Descent._step, Visit._judged, Visit.run

    def here(descent: Descent) -> tuple[Tensor, float | None]:
        factor = None if descent.temperature is None else float(descent.temperature.detach())
        return descent.raw.detach().clone(), factor

    def stepped(self: Descent, *args: Any) -> Step:
        found = step(self, *args)
        taken[-1].append(here(self))
        return found

    def judging(self: Visit, raw: Tensor, factor: float | None) -> Point:
        judged.append(judge(self, raw, factor))
        taken.append([])
        return judged[-1]

    def running(self: Visit) -> Point:
        ends.append(run(self))
        return ends[-1]

    monkeypatch.setattr(Descent, "_step", stepped)
    monkeypatch.setattr(Visit, "_judged", judging)
    monkeypatch.setattr(Visit, "run", running)
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
