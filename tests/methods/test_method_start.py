"""Learning may set out from the greedy soup of the same data, or from its top; everything else stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_method_resume import KilledError, Killer, Memory

from stockpot import Event, Soup, Task, cook
from stockpot.errors import MethodError
from stockpot.methods import averaging, guard, starts
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.learn import Learner
from stockpot.methods.settings import settings_for
from stockpot.methods.track import Track
from stockpot.soup import weights
from stockpot.task import Scores
from zoo import fine_tunes, flat, learning, mlp, samples, uneven, weights_of, write, zoo

BRIEF: dict[str, Any] = {"steps": 8, "batch_size": 16, "lr": 0.05, "start": "greedy"}
FOLDED: dict[str, Any] = {**BRIEF, "folds": 3, "evaluations": 4, "guard": False}


@pytest.fixture
def averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All folds are averaged, whatever lies between them (test_method_turns.py has that)."""

    def all_of_them(kitchen: Any, live: Any, kinds: averaging.Kinds, held_out: Any) -> averaging.Average:
        return averaging.plain([track for own in kinds.values() for track in own])

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


@pytest.mark.parametrize(
    "start", ["mean", "greedy", "top", ["greedy", "top"], ["top", "greedy"], ["top", "own-greedy"]]
)
def test_the_guard_compares_with_greedy_whatever_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    pool, task = uneven(tmp_path)
    decide, asked = guard.decide, []

    def heard(*given: Any) -> Any:
        asked.append(given[4])
        return decide(*given)

    monkeypatch.setattr(guard, "decide", heard)
    monkeypatch.setattr(starts, "top", lambda *_: (0, 1))
    cook(pool, task, "crossfit", **{**FOLDED, "guard": True, "start": start})
    wanted = members_of_all(pool, task)
    assert asked == [wanted]
    assert set(wanted) != {0, 1}


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


@pytest.mark.usefixtures("averaged")
def test_folds_choose_their_top_without_what_they_leave_out(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    given = {**FOLDED, "start": "top", "lr": 0.0}
    found = weights_of(cook(pool, task, "crossfit", **given))
    kitchen = Kitchen(pool, task)
    G = found.shape[1]
    wanted = torch.zeros_like(found)
    with kitchen.live(kitchen.layout("tensor")) as live:
        for inside, _ in task.fit.folds(3, 0):
            begin = starts.top(kitchen, live, inside, "")
            wanted += (weights.uniform(6, G) if begin is None else weights.chosen(6, G, begin)) / 3
        whole = starts.top(kitchen, live, None, "")
    assert (found - wanted).abs().max() <= 1e-12
    assert (found - weights.uniform(6, G)).abs().max() > 0.01  # some are left out
    assert whole is not None
    alone = weights_of(cook(pool, task, "mehl+", **{**BRIEF, "start": "top", "lr": 0.0}))
    assert torch.equal(alone, weights.chosen(6, G, whole))


@pytest.mark.usefixtures("averaged")
@pytest.mark.parametrize("start", [["greedy", "top"], ("top", "greedy", "mean")])
def test_folds_take_turns(tmp_path: Path, start: Any) -> None:
    pool, task = uneven(tmp_path)
    given = {**FOLDED, "start": start, "lr": 0.0}
    events: list[Event] = []
    found = weights_of(cook(pool, task, "crossfit", listen=events.append, **given))
    assert len([event for event in events if event.kind == "greedy"]) == 5  # one search
    G = found.shape[1]
    kitchen = Kitchen(pool, task)
    wanted = torch.zeros_like(found)
    with kitchen.live(kitchen.layout("tensor")) as live:
        for fold, (inside, _) in enumerate(task.fit.folds(3, 0)):
            begin: tuple[int, ...] | None = None
            match start[fold % len(start)]:
                case "greedy":
                    begin = starts.greedy_members(kitchen, live, settings_for("crossfit"), None, "")
                case "top":
                    begin = starts.top(kitchen, live, inside, "")
            wanted += (weights.uniform(6, G) if begin is None else weights.chosen(6, G, begin)) / 3
    assert (found - wanted).abs().max() <= 1e-12


def test_starts_that_make_no_sense_are_refused() -> None:
    assert settings_for("crossfit", start=["greedy", "top"]).start == ("greedy", "top")
    with pytest.raises(
        MethodError, match=r"setting start: expected at most as many as there are folds to take turns \(1\)"
    ):
        settings_for("mehl+", start=["greedy", "top"])
    with pytest.raises(MethodError, match="start 'leader': expected one of greedy, mean, own-greedy, top"):
        settings_for("crossfit", start=["greedy", "leader"])
    nonsense: list[Any] = [[], 3, {"greedy": 1}]
    for nothing in nonsense:
        with pytest.raises(
            MethodError, match="setting start: expected one of mean, greedy, own-greedy, top, or several"
        ):
            settings_for("crossfit", start=nothing)


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
    ("folds", "guard", "start"), [(1, False, "greedy"), (3, True, "greedy"), (3, True, ["greedy", "top"])]
)
def test_a_continued_run_does_not_choose_again(tmp_path: Path, folds: int, guard: bool, start: Any) -> None:
    pool, task = uneven(tmp_path)
    given = {**FOLDED, "folds": folds, "guard": guard, "retreat": folds > 1, "start": start}
    first: list[Event] = []
    whole = cook(pool, task, "crossfit", listen=first.append, **given)
    store = Memory(float("inf"))
    with pytest.raises(KilledError):
        cook(pool, task, "crossfit", store=store, listen=Killer(1), **given)
    events: list[Event] = []
    rest = cook(pool, task, "crossfit", store=store, listen=events.append, **given)
    searched = [len([event for event in heard if event.kind == "greedy"]) for heard in (first, events)]
    assert searched == [5 + 15 * guard, 15 * guard]  # the guard's own searches, one for each fold, come later
    assert torch.equal(weights_of(whole), weights_of(rest))


@pytest.mark.usefixtures("averaged")
@pytest.mark.parametrize(
    ("start", "folds"),
    [("mean", 1), ("greedy", 1), ("top", 1), ("mean", 3), ("greedy", 3), ("top", 3), (["greedy", "top"], 3)],
)
def test_going_part_of_the_way_is_the_same_part_for_every_weight(
    tmp_path: Path, start: Any, folds: int
) -> None:
    pool, task = uneven(tmp_path)
    given = {**FOLDED, "folds": folds, "retreat": folds > 1, "start": start}
    learned = weights_of(cook(pool, task, "crossfit", reach=1.0, **given))
    begun = weights_of(cook(pool, task, "crossfit", reach=1.0, **{**given, "lr": 0.0}))
    half = cook(pool, task, "crossfit", reach=0.25, **given)
    assert (learned - begun).abs().max() > 1e-3
    assert (weights_of(half) - begun.lerp(learned, 0.25)).abs().max() <= 1e-12


def test_what_the_guard_scores_is_what_is_returned(tmp_path: Path) -> None:
    """Part of the way: every sample by the soup that its own fold returned."""
    pool, task = uneven(tmp_path)
    given = {**FOLDED, "lr": 0.5, "reach": 0.4}
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
        W = weights.chosen(6, total.shape[1], chosen).lerp(track.W, 0.4)
        Soup(pool, result.soup.layout, W).load_into(task.model)
        assert torch.equal(result.held_out.values[outside], task.score(indices=outside).values)
        total += W / 3
    assert (total - result.soup.W).abs().max() <= 1e-12


def test_where_it_cannot_be_a_method_that_wants_it_starts_at_the_mean() -> None:
    for given in ({"decentralise": False}, {"centre": "soup"}, {"reset": True}, {"preset": "authors"}):
        settings = settings_for("crossfit", **given)
        assert (settings.start, settings.reach) == ("mean", 1.0)
    with pytest.raises(MethodError, match=r"setting start: expected mean, when .* are changed"):
        settings_for("mehl+", start="greedy", decentralise=False)
    with pytest.raises(MethodError, match=r"setting reach: expected 1\.0, when .* are changed"):
        settings_for("mehl+", reach=0.5, reset=True)
    with pytest.raises(MethodError, match="start 'gredy'"):
        settings_for("mehl+", start="gredy")
    for reach in (0.0, -1.0, 1.5):
        with pytest.raises(MethodError, match="setting reach: expected more than 0 and at most 1"):
            settings_for("mehl+", reach=reach)
