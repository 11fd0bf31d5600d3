"""What the default must show: each bar is met by what meets it, and missed by what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import script
from studies import pools

bars = script("bars")


def rows(scores: dict[str, list[float]], pool: str = "a", **more: Any) -> dict[tuple[str, int, str], dict[str, Any]]:
    both = {"accuracy": True, "loss": 1.0, "seconds": 1.0, "guard": "learned", **more}
    return {
        (pool, seed, who): {"pool": pool, "seed": seed, "candidate": who, "score": score, **both}
        for who, values in scores.items()
        for seed, score in enumerate(values)
    }


@pytest.mark.parametrize(
    ("default", "met"), [([0.80, 0.80, 0.80], True), ([0.78, 0.785, 0.78], False), ([0.85, 0.85, 0.785], False)]
)
def test_samples_the_mean_is_not_below_and_no_draw_far_below_best(default: list[float], met: bool) -> None:
    found = rows({"default": default, "greedy": [0.80, 0.79, 0.81], "best": [0.80, 0.80, 0.80]})
    lines, good = bars.samples(found)
    assert good is met
    assert lines[-1].endswith(f"| {'yes' if met else 'no'} |")


@pytest.mark.parametrize(("score", "met"), [(0.801, True), (0.797, False)])
def test_rates_move_it_by_less_than_two_tenths_of_a_point(score: float, met: bool) -> None:
    found = rows({"default": [0.80, 0.80], "rate 0.1": [score, score]})
    assert bars.rates(found)[1] is met


def test_few_counts_draws_below_all_three() -> None:
    simple = {"best": [0.8] * 4, "uniform": [0.7] * 4, "greedy": [0.8] * 4}
    assert bars.few(rows({"default": [0.6, 0.6, 0.7, 0.75], **simple}))[1] is True
    lines, met = bars.few(rows({"default": [0.6, 0.6, 0.69, 0.75], **simple}))
    assert not met
    assert lines[-1] == "below all three: 3 of 4"


@pytest.mark.parametrize(("learned", "met"), [((0.49, 0.52), True), ((0.54, 0.55), False)])
def test_chance_held_out_scores_are_half_within_two_errors(learned: tuple[float, float], met: bool) -> None:
    found: dict[tuple[str, int, str], dict[str, Any]] = {}
    for seed, value in enumerate(learned):
        held = {"learned": value, "best": 0.49 + 0.02 * seed, "uniform": 0.51 - 0.02 * seed}
        found["coins", seed, "default"] = {"guarded": held, "guard": "learned"}
        found["coins", seed, bars.CROSSED] = {"held_out": 0.49 + 0.02 * seed, "guard": None}
    lines, good = bars.chance(found)
    assert good is met
    assert lines[-1] == "the guard stepped in 0 of 2 times"


def test_demo_neither_behind_nor_slower_than_three_times() -> None:
    quick = rows({"hl+": [0.95, 0.96]}, seconds=1.0)
    assert bars.demo({**quick, **rows({"default": [0.95, 0.955]}, seconds=2.9)})[1]
    assert not bars.demo({**quick, **rows({"default": [0.95, 0.955]}, seconds=3.1)})[1]
    assert not bars.demo({**quick, **rows({"default": [0.94, 0.951]}, seconds=1.0)})[1]


def test_the_demo_is_compared_with_the_settings_of_its_recipe() -> None:
    from stockpot.zoo.demo import OWN_STEPS, STEPS

    found = bars.as_in_the_demo()
    assert found["hl+"].settings["steps"] == STEPS
    assert found["default"].settings["steps"] == OWN_STEPS
    assert found["default"].settings["batch_size"] == found["hl+"].settings["batch_size"]


def test_runs_are_written_once_and_the_table_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["chance", "--seeds", "2", "--results", str(tmp_path / "results"), "--made", str(tmp_path / "made")]
    for name in ("coins", "coins-400"):
        brief = pools.OTHERS[name]
        assert isinstance(brief, pools.Small)
        monkeypatch.setitem(pools.OTHERS, name, replace(brief, models=2, epochs=0.5))
    assert bars.main(given) == 0
    first = capsys.readouterr().out
    assert "| coins, greedy | " in first
    kept = (tmp_path / "results" / "chance.jsonl").read_text()
    assert len(kept.splitlines()) == 8
    assert bars.main([*given, "--table"]) == 0
    assert capsys.readouterr().out.splitlines()[-5:] == first.splitlines()[-5:]
    assert (tmp_path / "results" / "chance.jsonl").read_text() == kept


def test_labels_by_chance_have_nothing_to_do_with_inputs() -> None:
    parts = pools.coins(0, 100)
    x, y = parts["dev"]
    assert abs(float(y.float().mean()) - 0.5) < 0.03
    assert float(torch.corrcoef(torch.stack([x[:, 0], y.float()]))[0, 1].abs()) < 0.06
