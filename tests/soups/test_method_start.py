"""Learning may set out from greedy soups of the same data; everything else stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_method_resume import KilledError, Killer, Memory

from stockpot import Event, Soup, Task, cook
from stockpot.errors import MethodError
from stockpot.soup import weights
from stockpot.soups import averaging, guard, starts
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.learn import Learner
from stockpot.soups.settings import settings_for
from stockpot.soups.track import Track
from stockpot.task import Scores
from zoo import fine_tunes, flat, learning, mlp, samples, uneven, weights_of, write, zoo

BRIEF: dict[str, Any] = {"steps": 8, "batch_size": 16, "lr": 0.05, "start": "greedy"}
FOLDED: dict[str, Any] = {**BRIEF, "folds": 3, "evaluations": 4, "guard": False}


@pytest.fixture
def averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All folds are averaged, whatever lies between them (test_method_averaging.py has that)."""

    def all_of_them(kitchen: Any, live: Any, found: list[list[Track]], held_out: Any) -> averaging.Average:
        return averaging.plain([track for own in found for track in own])

    monkeypatch.setattr(averaging, "checked", all_of_them)


def members_of_all(pool: Any, task: Task) -> tuple[int, ...]:
    kitchen = Kitchen(pool, task)
    with kitchen.live(kitchen.layout("tensor")) as live:
        return starts.greedy_members(kitchen, live, settings_for("crossfit"), None, "greedy soup")


@pytest.mark.parametrize("block_size", [2, 6])
def test_a_learning_rate_of_zero_returns_the_greedy_soup(tmp_path: Path, block_size: int) -> None:
    pool, task = uneven(tmp_path)
    found = weights_of(cook(pool, task, "mehl+", block_size=block_size, **{**BRIEF, "lr": 0.0}))
    chosen = members_of_all(pool, task)
    assert 1 <= len(chosen) < 6
    assert torch.equal(found, weights.chosen(6, found.shape[1], chosen))


def test_every_fold_sets_out_from_the_greedy_soup_of_all_samples(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    events: list[Event] = []
    found = weights_of(cook(pool, task, "crossfit", listen=events.append, **{**FOLDED, "lr": 0.0}))
    wanted = weights.chosen(6, found.shape[1], members_of_all(pool, task))
    assert (found - wanted).abs().max() <= 1e-12
    assert len([event for event in events if event.kind == "greedy"]) == 5  # one search among six


@pytest.mark.parametrize("start", ["mean", "greedy"])
def test_the_guard_compares_with_greedy_whatever_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    pool, task = uneven(tmp_path)
    decide, asked = guard.decide, []

    def heard(*given: Any) -> Any:
        asked.append(given[4])
        return decide(*given)

    monkeypatch.setattr(guard, "decide", heard)
    cook(pool, task, "crossfit", **{**FOLDED, "guard": True, "start": start})
    wanted = members_of_all(pool, task)
    assert asked == [wanted]


@pytest.mark.usefixtures("averaged")
def test_folds_set_out_from_greedy_soups_of_their_own(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    given = {**FOLDED, "start": "own-greedy", "lr": 0.0}
    events: list[Event] = []
    found = weights_of(cook(pool, task, "crossfit", listen=events.append, **given))
    kitchen = Kitchen(pool, task)
    G = found.shape[1]
    with kitchen.live(kitchen.layout("tensor")) as live:
        own = [
            starts.greedy_members(kitchen, live, settings_for("crossfit"), inside, "")
            for inside, _ in task.fit.folds(3, 0)
        ]
    assert len(set(own)) > 1
    assert len([event for event in events if event.kind == "greedy"]) == 3 * 5
    wanted = torch.stack([weights.chosen(6, G, members) for members in own]).mean(dim=0)
    assert (found - wanted).abs().max() <= 1e-12
    alone = weights_of(cook(pool, task, "mehl+", **{**BRIEF, "start": "own-greedy", "lr": 0.0}))
    assert torch.equal(alone, weights.chosen(6, G, members_of_all(pool, task)))


def test_the_guard_takes_greedy_soups_that_folds_have_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was chosen on what it is scored on, and nothing is searched again; greedy itself is that of all data."""
    pool, task = uneven(tmp_path)
    events: list[Event] = []
    given = {**FOLDED, "start": "own-greedy", "guard": True}
    told = [
        h for h in cook(pool, task, "crossfit", listen=events.append, **given).history if h["kind"] == "guard"
    ]
    assert [(h["flattered"], h["flattery"]) for h in told] == [([], None)]
    assert len([event for event in events if event.kind == "greedy"]) == 3 * 5
    kitchen, settings = Kitchen(pool, task), settings_for("crossfit", **given)
    with kitchen.live(kitchen.layout("tensor")) as live:
        fair = guard.cross_fitted_greedy(kitchen, live, settings, task.fit.folds(3, 0))
    assert told[0]["held_out"]["greedy"] == float(fair.mean())
    decide = guard.decide_by_own

    def for_greedy(kitchen: Any, live: Any, learned: Any, *rest: Any) -> guard.Decision:
        known = dict(decide(kitchen, live, learned, *rest).known)
        zeros, ones = torch.zeros_like(learned.values), torch.ones_like(learned.values)
        return guard.Decision({**dict.fromkeys(known, Scores(zeros)), "greedy": Scores(ones)})

    monkeypatch.setattr(guard, "decide_by_own", for_greedy)
    won = weights_of(cook(pool, task, "crossfit", **given))
    assert torch.equal(won, weights.chosen(6, won.shape[1], members_of_all(pool, task)))


@pytest.mark.parametrize("block_size", [2, 5])
def test_what_was_learned_is_what_its_weights_build(tmp_path: Path, block_size: int) -> None:
    pool, task = zoo(tmp_path, 5)
    with learning(pool, task, "mehl+", block_size=block_size, passes=2, **BRIEF) as learner:
        learner.tracks[0].start = (1, 3)
        learner.run()
        track = learner.tracks[0]
        assert (track.W - weights.chosen(5, track.W.shape[1], (1, 3))).abs().max() > 1e-3
        assert (track.W.sum(dim=0) - 1).abs().max() <= 1e-12
        built = flat(learner.live, Soup(pool, learner.live.layout, track.W).state_dict())
        assert (built - track.theta).abs().max() <= 3e-6 * max(1.0, float(built.abs().max()))


def test_it_lowers_the_loss_from_there(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    result = cook(pool, task, "crossfit", **FOLDED)
    for fold in range(3):
        losses = [h["loss"] for h in result.history if h["kind"] == "held_out" and h["fold"] == fold]
        assert min(losses) < losses[0]


def test_permuting_ingredients_permutes_the_weights_also_where_scores_are_equal(tmp_path: Path) -> None:
    states = [{n: v.double() for n, v in s.items()} for s in fine_tunes(mlp, 5, steps=2)]
    task = Task(mlp().double(), samples(24, dtype=torch.float64))
    order = [3, 0, 4, 2, 1]
    own = Kitchen(write(tmp_path / "plain", states), task).individual_values().mean(dim=1)
    assert len(set(own.tolist())) < 5, "no two of them have the same accuracy"
    plain = weights_of(cook(write(tmp_path / "again", states), task, "crossfit", **FOLDED))
    mixed = weights_of(
        cook(write(tmp_path / "mixed", [states[k] for k in order]), task, "crossfit", **FOLDED)
    )
    assert (plain[order] - mixed).abs().max() <= 1e-8


def test_of_ingredients_with_equal_scores_the_same_one_is_chosen_wherever_it_stands(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 4))
    task = Task(mlp(), samples(24), metric=lambda outputs, batch: torch.ones(len(batch[1])))
    chosen = set()
    for first in range(4):
        turned = pool.subset([(first + k) % 4 for k in range(4)])
        found = members_of_all(turned, task)
        chosen.add(tuple(turned.digests()[k] for k in found))
    assert len(chosen) == 1


@pytest.mark.parametrize(
    ("folds", "guard", "start"),
    [(1, False, "greedy"), (3, True, "greedy"), (1, False, "own-greedy"), (3, True, "own-greedy")],
)
def test_a_continued_run_does_not_choose_again(tmp_path: Path, folds: int, guard: bool, start: Any) -> None:
    pool, task = uneven(tmp_path)
    given = {
        **FOLDED,
        "folds": folds,
        "guard": guard,
        "retreat": folds > 1,
        "smooth": folds > 1,
        "start": start,
    }
    first: list[Event] = []
    whole = cook(pool, task, "crossfit", listen=first.append, **given)
    store = Memory(float("inf"))
    with pytest.raises(KilledError):
        cook(pool, task, "crossfit", store=store, listen=Killer(1), **given)
    events: list[Event] = []
    rest = cook(pool, task, "crossfit", store=store, listen=events.append, **given)
    searched = [len([event for event in heard if event.kind == "greedy"]) for heard in (first, events)]
    own = start == "own-greedy" and folds > 1
    # The guard's own searches, one for each fold, come later; of folds with soups of their own it needs none.
    assert searched == ([15, 0] if own else [5 + 15 * guard, 15 * guard])
    labels = [
        event.data["what"] for event in first if event.kind == "progress" and "greedy" in event.data["what"]
    ]
    wanted = {f"greedy soup, fold {n} of 3" for n in (1, 2, 3)} if own else {"greedy soup"}
    assert {label for label in labels if "soup " not in label} == wanted
    assert torch.equal(weights_of(whole), weights_of(rest))


def test_what_the_guard_scores_is_what_is_returned(tmp_path: Path) -> None:
    """Every sample by the soup that its own fold learned."""
    pool, task = uneven(tmp_path)
    given = {**FOLDED, "lr": 0.5}
    result = cook(pool, task, "crossfit", **given)
    assert result.held_out is not None
    assert result.soup is not None
    total = torch.zeros_like(result.soup.W)
    for fold, (inside, outside) in enumerate(task.fit.folds(3, 0)):
        data, left = task.fit.subset(inside), task.fit.subset(outside)
        settings = settings_for("crossfit", **given)
        kitchen = Kitchen(pool, task)
        with kitchen.live(kitchen.layout("tensor")) as live:
            chosen = starts.greedy_members(kitchen, live, settings, None, "greedy soup")
            track = Track(fold, data, left, chosen)
            Learner(live, settings, [track]).run()
        Soup(pool, result.soup.layout, track.W).load_into(task.model)
        assert torch.equal(result.held_out.values[outside], task.score(indices=outside).values)
        total += track.W / 3
    assert (total - result.soup.W).abs().max() <= 1e-12


def test_where_it_cannot_be_a_method_that_wants_it_starts_at_the_mean() -> None:
    for given in ({"decentralise": False}, {"centre": "soup"}, {"reset": True}, {"preset": "authors"}):
        settings = settings_for("crossfit", **given)
        assert settings.start == "mean"
    with pytest.raises(MethodError, match=r"setting start: expected mean, when .* are changed"):
        settings_for("mehl+", start="greedy", decentralise=False)
    with pytest.raises(MethodError, match="start 'gredy': expected one of greedy, mean, own-greedy, found"):
        settings_for("mehl+", start="gredy")
    for nothing in ([], ["greedy", "mean"], 3, None):
        with pytest.raises(MethodError, match="expected one of greedy, mean, own-greedy"):
            settings_for("crossfit", start=nothing)
