"""A model first moves as a whole, then its groups part; where held-out loss does not fall, steps get smaller."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stockpot import cook
from stockpot.engine.descent import learning_rates
from stockpot.errors import MethodError
from stockpot.methods.settings import settings_for
from stockpot.methods.visit import SLOWEST
from zoo import zoo

BRIEF: dict[str, Any] = {"batch_size": 16, "lr": 0.1}


def history(folder: Path, method: str, **settings: Any) -> list[dict[str, Any]]:
    pool, task = zoo(folder, 5)
    return [dict(h) for h in cook(pool, task, method, **{**BRIEF, **settings}).history]


def losses(told: list[dict[str, Any]]) -> list[float]:
    return [h["loss"] for h in told if h["kind"] == "step"]


def test_the_first_part_is_a_soup_with_one_coefficient_per_model(tmp_path: Path) -> None:
    whole = losses(history(tmp_path / "a", "hl", steps=8))
    staged = losses(history(tmp_path / "b", "hl+", steps=16, coarse=0.5))
    fine = losses(history(tmp_path / "c", "hl+", steps=16))
    assert staged[:8] == pytest.approx(whole, rel=1e-5)
    assert len(staged) == 16
    assert fine[1:8] != pytest.approx(whole[1:], rel=1e-3)  # the two are told apart


def test_afterwards_the_groups_part(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    W = {}
    for steps, coarse in ((16, 0.5), (16, 0.99)):
        soup = cook(pool, task, "hl+", steps=steps, coarse=coarse, **BRIEF).soup
        assert soup is not None
        W[coarse] = soup.W
    assert (W[0.99] - W[0.99][:, :1]).abs().max() < 1e-5  # 16 of 16 steps together
    assert (W[0.5] - W[0.5][:, :1]).abs().max() > 1e-2


def test_the_schedule_begins_anew() -> None:
    rates = learning_rates(settings_for("hl+"), 8, 0.5)
    assert rates[:4] == rates[4:] == learning_rates(settings_for("hl+"), 4)
    assert learning_rates(settings_for("hl+", schedule="constant"), 8, 0.25) == [0.01] * 8
    for share in (0.0, 1.0):
        assert learning_rates(settings_for("hl+"), 8, share) == learning_rates(settings_for("hl+"), 8)


@pytest.mark.parametrize("advance", [1.0, 1.5])
def test_steps_get_smaller_where_held_out_loss_does_not_fall_and_larger_where_it_does(
    tmp_path: Path, advance: float
) -> None:
    told = history(
        tmp_path, "crossfit",
        folds=2, steps=60, evaluations=30, coarse=0.0, lr=5.0, schedule="constant", guard=False, advance=advance,
    )  # fmt: skip
    for fold in (0, 1):
        mine = [h for h in told if h.get("fold") == fold]
        rate, best, advances = 5.0, float("inf"), 0
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
        assert rate * 0.5 <= 5.0 * SLOWEST < rate


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"retreat": True}, "setting retreat: expected False, or folds of at least 2"),
        ({"coarse": 1.1}, "setting coarse: expected a share in"),
        ({"coarse": -0.1}, "setting coarse: expected a share in"),
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
    assert (default.lr, default.coarse, default.retreat, default.guard) == (0.02, 0.0, True, True)
