"""The guard believes held-out data where it says more than chance does, and only samples that had no say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot import Event, Soup, Task, cook
from stockpot.soup import weights
from stockpot.soups import crossfit
from stockpot.soups.crossfit import guard_record, joined
from stockpot.soups.problem import Problem
from stockpot.task import METRICS, Scores
from zoo import fine_tunes, guard_of, mlp, one_good_model, samples, uneven, weights_of, write, zoo

BRIEF: dict[str, Any] = {"steps": 60, "batch_size": 16, "lr": 0.1, "folds": 3}


def scores(values: Tensor) -> Scores:
    return Scores(values.double().reshape(-1, 1), METRICS["accuracy"])


def spoil_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned scores nothing on held-out data."""
    learn_folds = crossfit._learned

    def spoilt(*args: Any) -> Any:
        found = learn_folds(*args)
        assert found.held_out is not None
        return replace(found, held_out=replace(found.held_out, table=found.held_out.table * 0))

    monkeypatch.setattr(crossfit, "_learned", spoilt)


def test_the_guard_prefers_what_scores_higher_on_held_out_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_learned(monkeypatch)
    pool, task = one_good_model(tmp_path)
    events: list[Event] = []
    result = cook(pool, task, "crossfit", listen=events.append, **BRIEF)
    decision = guard_of(result)
    assert decision["winner"] == "best"
    assert decision["held_out"]["best"] > decision["held_out"]["learned"] == 0
    W = weights_of(result)
    assert torch.equal(W[1], torch.ones(W.shape[1], dtype=torch.float64))
    assert result.models_used == 1
    assert result.held_out is not None
    assert result.held_out.value == decision["held_out"]["best"]
    assert "the guard returned best" in result.notes[0]
    assert "instead of the learned soup" in str(result)
    assert [e.data["winner"] for e in events if e.kind == "guard"] == ["best"]


def test_a_loss_with_the_wrong_sign_does_not_cost_the_accuracy_that_the_ingredients_have(tmp_path: Path) -> None:
    def wrong(model: nn.Module, batch: Any) -> Tensor:
        return -nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none").clamp(max=5)

    pool = write(tmp_path, fine_tunes(mlp, 4, steps=200))
    task = Task(mlp(), samples(200), loss=wrong, metric="accuracy")
    result = cook(pool, task, "crossfit", **BRIEF)
    held_out = guard_of(result)["held_out"]
    assert held_out["learned"] < held_out["best"] - 0.1
    assert guard_of(result)["winner"] in ("best", "uniform")
    result.soup.load_into(task.model)  # type: ignore[union-attr]
    assert task.score().value > 0.8


def test_whoever_wins_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = uneven(tmp_path)
    monkeypatch.setattr(crossfit, "guard_record", lambda known: {**guard_record(known), "winner": "uniform"})
    W = weights_of(cook(pool, task, "crossfit", **{**BRIEF, "beta": True}))
    assert torch.equal(W, weights.uniform(6, W.shape[1]))


def test_the_guards_own_soups_are_chosen_without_the_samples_they_are_scored_on(tmp_path: Path) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 8, seed=3)), Task(mlp(), samples())
    decision = guard_of(cook(pool, task, "crossfit", **{**BRIEF, "steps": 4}))
    own = torch.stack([one.table[:, 0] for one in Problem(pool, task).individual()])  # (K, n)
    best = torch.empty(48, dtype=torch.float64)
    for inside, outside in task.fit.folds(3, 0):
        best[outside] = own[own[:, inside].mean(dim=1).argmax(), outside]
    assert decision["held_out"]["best"] == float(best.mean())
    assert best.mean() != own.mean(dim=1).max()  # choosing on all samples would have looked different
    Soup.uniform(pool).load_into(task.model)
    assert decision["held_out"]["uniform"] == task.score().value
    for name in ("best", "uniform"):
        mean, low, high = decision["over_learned"][name]
        assert mean == pytest.approx(decision["held_out"][name] - decision["held_out"]["learned"])
        assert low < mean < high


def test_what_the_guard_found_out_about_others_is_their_held_out_score(tmp_path: Path) -> None:
    from stockpot import compare

    pool, task = uneven(tmp_path)
    found = compare(pool, task, ["best", "uniform", "hl+", "crossfit"], each={"crossfit": BRIEF}, steps=4)
    decision = guard_of(found["crossfit"])
    for name in ("best", "uniform"):
        held_out = found[name].held_out
        assert held_out is not None
        assert held_out.value == decision["held_out"][name]
    assert found["hl+"].held_out is None


@pytest.mark.parametrize(("more", "winner"), [(0, "learned"), (16, "learned"), (21, "learned"), (26, "best")])
def test_the_guard_steps_in_beyond_chance_only(more: int, winner: str) -> None:
    """Of 1,000 samples, 30 are right by the learned soup alone and 30 + `more` by the best ingredient alone.

    20 more would do for one comparison; there are two.
    """
    learned, best = torch.ones(1000), torch.ones(1000)
    best[:30] = 0
    learned[30 : 60 + more] = 0
    known = {"learned": learned, "best": best, "uniform": torch.zeros(1000)}
    decision = guard_record({name: scores(values) for name, values in known.items()})
    assert decision["winner"] == winner
    assert decision["over_learned"]["best"][0] == pytest.approx(more / 1000)


def test_of_several_that_are_better_the_guard_takes_the_best() -> None:
    right = {"learned": 500, "best": 700, "uniform": 900}
    assert guard_record({name: scores(torch.arange(1000) < n) for name, n in right.items()})["winner"] == "uniform"


def test_a_score_that_is_no_number_does_not_win_against_the_guard() -> None:
    known = {
        "learned": scores(torch.full((50,), torch.nan)),
        "best": scores(torch.ones(50)),
        "uniform": scores(torch.zeros(50)),
    }
    decision = guard_record(known)
    assert decision["winner"] == "best"
    assert decision["held_out"]["learned"] is None  # plain JSON


def test_equal_scores_keep_the_learned_soup(tmp_path: Path) -> None:
    """Where every sample is right whatever is done, there is no reason to fall back."""
    pool = write(tmp_path, fine_tunes(mlp, 3, steps=0))
    task = Task(mlp(), samples(24), metric=lambda outputs, batch: torch.ones(len(batch[1])))
    assert guard_of(cook(pool, task, "crossfit", **BRIEF))["winner"] == "learned"


def test_the_guard_works_for_a_metric_that_is_no_mean(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path, 4)
    result = cook(pool, Task(mlp(), samples(), metric="macro_f1"), "crossfit", **BRIEF)
    decision = guard_of(result)
    assert result.held_out is not None
    assert result.held_out.metric.name == "macro_f1"
    assert decision["intervals"]["learned"][0] < decision["held_out"]["learned"] < decision["intervals"]["learned"][1]


def test_parts_come_together_in_the_order_of_the_whole() -> None:
    places = [torch.tensor([3, 0]), torch.tensor([1, 2])]
    parts = [scores(torch.tensor([30.0, 0.0])), scores(torch.tensor([10.0, 20.0]))]
    assert joined(parts, places).table[:, 0].tolist() == [0, 10, 20, 30]


def test_without_folds_there_is_nothing_to_guard_by(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    settings = {**BRIEF, "folds": 1, "steps": 4}
    result = cook(pool, task, "crossfit", **settings)
    assert result.held_out is None
    assert torch.equal(weights_of(result), weights_of(cook(pool, task, "mehl+", **settings)))
