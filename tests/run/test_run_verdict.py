"""A soup is recommended for what it did on data it was not fitted on, or not at all."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stockpot.run.verdict import advised, compared_on, differences, held_out, recommended, verdict
from stockpot.soups.registry import settings_for
from stockpot.soups.result import Result
from stockpot.task import METRICS, Metric, Scores

SOUP: Any = SimpleNamespace(W=torch.tensor([[0.0], [1.0], [0.0], [0.0]], dtype=torch.float64))
MIXED: Any = SimpleNamespace(W=torch.tensor([[0.2], [0.5], [0.3], [0.0]], dtype=torch.float64))
NAMES = ("run-6", "run-7", "run-8", "run-9")


def record(
    name: str, used: int = 3, guard: dict[str, Any] | None = None, metric: Metric = METRICS["accuracy"], **right: float
) -> Result:
    """A method that got so many of 100 samples right, by kind of data."""
    scores: dict[str, Any] = {"fit": None, "reports": {}}
    for kind, n in right.items():
        table = torch.full((100, 1), math.nan) if math.isnan(n) else (torch.arange(100) < n)[:, None]
        (scores if kind in ("fit", "held_out") else scores["reports"])[kind] = Scores(table.double(), metric)
    history = () if guard is None else (guard,)
    soup = None if name == "ensemble" else SOUP if name == "best" or used == 1 else MIXED
    return Result(name, settings_for(name), soup, models_used=used, history=history, **scores)


def records(*found: Result) -> dict[str, Result]:
    return {one.method: one for one in found}


def guard(**values: float | None) -> dict[str, Any]:
    ends = {name: [None, None] if v is None else [v - 0.1, v + 0.1] for name, v in values.items()}
    return {"kind": "guard", "held_out": dict(values), "intervals": ends, "over_learned": {}, "winner": "learned"}


def test_fitting_scores_recommend_nothing() -> None:
    """Before, hl+ was recommended on every zoo for the highest score on the data it was fitted on."""
    found = records(record("best", fit=80, report=80), record("hl+", fit=99, report=70))
    assert recommended(held_out(found), found) is None
    text = verdict(found, None, NAMES)
    assert text.startswith("No method is recommended.\nNone of them was scored on samples that it was not fitted on")
    assert "crossfit" in text


def test_the_guard_speaks_for_the_simple_methods_and_has_chosen_between_them() -> None:
    """A higher score within chance was recommended before: of nine such soups eight were worse, and one as good."""
    judged = guard(learned=0.85, best=0.8, uniform=0.6, greedy=0.9)
    found = records(
        record("best", fit=80), record("uniform", fit=70), record("greedy", fit=85), record("hl+", fit=99),
        record("crossfit", fit=90, held_out=85, guard=judged),
    )  # fmt: skip
    evidence = held_out(found)
    assert {name: one["value"] for name, one in evidence.items()} == {
        "best": 0.8, "uniform": 0.6, "greedy": 0.9, "crossfit": 0.85,
    }  # fmt: skip
    assert recommended(evidence, found) == "crossfit"
    assert recommended({**evidence, "hl+": {"value": 0.86}}, found) == "hl+"


def test_what_the_guard_calls_learned_is_not_the_method_of_that_name() -> None:
    found = records(
        record("learned", fit=99), record("crossfit", fit=90, held_out=85, guard=guard(learned=0.85, best=0.8))
    )
    assert set(held_out(found)) == {"crossfit"}


def test_every_method_with_folds_has_a_say_and_the_ensemble_has_none() -> None:
    found = records(
        record("ensemble", fit=99, held_out=99),
        record("mehl+", fit=80, held_out=88),
        record("crossfit", fit=90, held_out=85, guard=guard(learned=0.85)),
    )
    assert recommended(held_out(found), found) == "mehl+"


def test_of_equals_the_one_that_mixes_more_and_of_nan_nothing() -> None:
    found = records(record("best", fit=8), record("crossfit", fit=9, held_out=80, guard=guard(learned=0.8, best=0.8)))
    assert recommended(held_out(found), found) == "crossfit"
    nothing = records(record("best", fit=8), record("hl", fit=9, held_out=math.nan, guard=guard(best=None)))
    assert recommended(held_out(nothing), nothing) is None


def test_scores_on_different_data_are_not_compared() -> None:
    assert compared_on({}) is None
    some = records(record("best", fit=80, report=70), record("hl+", fit=90))
    assert compared_on(some) == "fit"
    every = records(record("best", fit=80, report=70), record("hl+", fit=90, report=75))
    assert compared_on(every) == "report"
    assert differences(every, "report")["hl+"]["report"][0] == pytest.approx(0.05)
    assert differences(records(record("hl+", fit=90)), "fit") == {}  # nothing to compare with


def test_the_best_model_itself_differs_from_it_by_nothing() -> None:
    """Before, a greedy soup of that one model stood there with "+0.0 (-0.6 to +0.6)"."""
    found = records(record("best", report=70), record("greedy", used=1, report=70), record("hl+", report=70))
    apart = differences(found, "report")
    assert apart["greedy"] == {"report": [0.0, 0.0, 0.0]}
    assert all(apart["hl+"]["report"][1:])  # what chance can do between two models that score the same


@pytest.mark.parametrize(("mine", "use"), [(90, True), (51, False), (20, False)])
def test_only_a_gain_beyond_chance_is_advised(mine: int, use: bool) -> None:
    found = records(record("best", fit=1, report=50), record("greedy", fit=1, report=mine))
    assert advised(verdict(found, "greedy", NAMES)) is use


@pytest.mark.parametrize(
    ("best", "mine", "decision", "said"),
    [
        (
            50,
            90,
            r"Use it: hl\+ gains \+40\.00 points beyond chance\.",
            r"The gain of \+40\.00 points is beyond chance \(",
        ),
        (90, 50, r"A loss beyond chance: keep run-7\.", r"The loss of -40\.00 points is beyond chance \("),
        (50, 50, r"No gain beyond chance: keep run-7\.", r"There is no difference on this data \(95 % interval"),
        (50, 51, r"No gain beyond chance: keep run-7\.", r"\+1\.00 points is within chance on this much data \("),
    ],
)
def test_the_first_line_is_the_decision_and_the_second_the_reason(
    best: int, mine: int, decision: str, said: str
) -> None:
    text = verdict(records(record("best", fit=1, report=best), record("hl+", fit=1, report=mine)), "hl+", NAMES)
    first, why = text.split("\n")
    assert re.fullmatch(decision, first)
    assert why.startswith(f"hl+ mixes 3 of 4 models; scores {mine}.00 % (95 % interval ")
    assert "on data nothing was chosen on; the best single model, run-7, scores" in why
    assert re.search(said, why)


def test_what_another_set_lost_beyond_chance_is_called_forgetting() -> None:
    """The first set decides; a loss on another one is in the decision too, and a change within chance is not."""
    found = records(
        record("best", fit=1, test=50, shifted=90, base=60), record("hl+", fit=1, test=90, shifted=50, base=61)
    )
    assert compared_on(found) == "report"
    assert {name: one[0] for name, one in differences(found, "report")["hl+"].items()} == {
        "test": pytest.approx(0.4), "shifted": pytest.approx(-0.4), "base": pytest.approx(0.01),
    }  # fmt: skip
    first, why = verdict(found, "hl+", NAMES).split("\n")
    assert first == ("Use it: hl+ gains +40.00 points beyond chance, but it forgot: -40.00 points on shifted.")
    assert "on data nothing was chosen on (test)" in why
    assert re.search(
        r"It forgot: on shifted it scores 50\.00 % \(.*, run-7 90\.00 % \(.*The loss of -40\.00 points", why
    )
    assert re.search(r"\. On base it scores 61\.00 % .*\+1\.00 points is within chance", why)


def test_the_decision_for_a_single_model_an_ensemble_and_no_report_data() -> None:
    found = records(record("greedy", used=1, fit=80), record("ensemble", used=4, fit=70))
    first, why = verdict(found, "greedy", NAMES).split("\n")
    assert first == "No gain from mixing: keep run-7."
    assert why.startswith("greedy keeps that single model of the 4, which scores 80.00 %")
    assert "the data it was fitted on (no report data was given)" in why
    first, why = verdict(found, "ensemble", NAMES).split("\n")
    assert first == "Not known whether to use it: it was compared with nothing."
    assert why.startswith("ensemble averages the outputs of 4 models and scores 70.00 %")
    fitted = verdict(records(record("best", fit=50), record("hl+", fit=90)), "hl+", NAMES)
    assert fitted.startswith("Not known whether to use it: give report data, or keep run-7.\n")


@pytest.mark.parametrize(("metric", "unit"), [("loss", ""), ("negative_mae", "")])
def test_a_metric_that_is_no_share_is_not_shown_in_percent(metric: str, unit: str) -> None:
    found = records(*(record(name, fit=n, metric=METRICS[metric]) for name, n in (("best", 50), ("hl+", 90))))
    text = verdict(found, "hl+", NAMES)
    assert "points" not in text
    assert unit in text
    assert "%" not in text.replace("95 % interval", "")


def test_nats_are_called_nats() -> None:
    table = torch.stack([-torch.arange(100.0), torch.ones(100)], dim=1).double()
    one, two = (Scores(table * torch.tensor([scale, 1.0]), METRICS["nats_per_token"]) for scale in (-1.0, -0.5))
    found = records(
        *(
            Result(n, settings_for(n), SOUP, s, reports={"report": s}, models_used=3)
            for n, s in (("best", one), ("hl+", two))
        )
    )
    first, why = verdict(found, "hl+", NAMES).split("\n")
    assert first == "Use it: hl+ gains +24.75 nats beyond chance."
    assert "scores -24.75 nats (95 % interval" in why


def test_a_sample_without_a_number_is_named_and_nothing_is_decided() -> None:
    found = records(record("best", fit=80, report=math.nan), record("hl+", fit=85, report=math.nan))
    said = verdict(found, "hl+", NAMES)
    assert said.startswith("Not known whether to use it: there is no score to compare.")
    assert (
        "hl+ mixes 3 of 4 models; scores no number (accuracy is NaN for 100 of 100 samples, first for number 0" in said
    )
    assert "+nan" not in said
