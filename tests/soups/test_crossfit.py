"""Cross-fitting: what is held out is really held out, and the guard believes it where it says more than chance does."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resuming import KilledError, Killer, Memory
from torch import Tensor

from stockpot import Event, Result, Soup, Task, cook
from stockpot.engine import Engine
from stockpot.pool import Pool
from stockpot.soup import weights
from stockpot.soups import crossfit, learn
from stockpot.soups.crossfit import judged, together, without_hill
from stockpot.soups.fold import Fold
from stockpot.soups.greedy import greedy
from stockpot.soups.learn import SLOWEST, Learner
from stockpot.soups.mehl import State
from stockpot.soups.mehl import weights as mixed
from stockpot.soups.problem import Problem
from stockpot.task import METRICS, Data, Scores
from zoo import decide, fine_tunes, mlp, samples, uneven, weights_of, write, zoo

BRIEF: dict[str, Any] = {"steps": 60, "batch_size": 16, "lr": 0.1, "folds": 3}


def scores(values: Tensor) -> Scores:
    return Scores(values.double().reshape(-1, 1), METRICS["accuracy"])


def folds_of(result: Result, kind: str, fold: int) -> list[dict[str, Any]]:
    return [dict(h) for h in result.history if h["kind"] == kind and h["fold"] == fold]


def guard(result: Result) -> dict[str, Any]:
    return dict(next(h for h in result.history if h["kind"] == "guard"))


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Fold]:
    """The folds of the latest run."""
    folds: list[Fold] = []
    run = Learner.run

    def watched(self: Learner, *args: Any) -> None:
        folds[:] = self.folds
        run(self, *args)

    monkeypatch.setattr(Learner, "run", watched)
    return folds


# Where folds set out from, and on how many samples that is decided.


def test_enough_samples_are_drawn_by_seed_and_kept_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossfit, "ENOUGH", 20)
    few = torch.arange(20)
    assert crossfit.enough(few, 0) is few
    drawn = [crossfit.enough(torch.arange(100, 200), seed) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    for one in drawn:
        assert len(one) == 20
        assert torch.equal(one, torch.unique(one))
        assert 100 <= int(one.min()) <= int(one.max()) < 200


def starts(pool: Pool, task: Task, **settings: Any) -> tuple[list[Any], Result]:
    seen: list[Any] = []
    run = Learner.run

    def watched(self: Learner, *args: Any) -> None:
        run(self, *args)
        seen.extend(fold.start for fold in self.folds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "run", watched)
        return seen, cook(pool, task, "crossfit", **{**BRIEF, **settings})


def test_starts_and_stopping_of_large_data_are_decided_on_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 5, spread=0.4))
    task = Task(mlp(), samples(90))
    judged_on: list[int] = []
    loss_on = Engine.loss_on

    def watched(self: Engine, data: Data, beta: float | None) -> float:
        judged_on.append(len(data))
        return loss_on(self, data, beta)

    monkeypatch.setattr(crossfit, "ENOUGH", 20)
    monkeypatch.setattr(Engine, "loss_on", watched)
    found, result = starts(pool, task)
    problem = Problem(pool, task)
    few = crossfit.enough(torch.arange(90), 0)
    with problem.live(problem.layout("model")) as live:
        for start, (inside, _) in zip(found, task.fit.folds(3, 0), strict=True):
            some = inside[torch.isin(inside, few)]
            assert 5 < len(some) < 20
            assert start == greedy(problem, live, indices=some, by_content=True).chosen
    assert set(judged_on) == {20}  # of 30 left out
    assert result.held_out is not None
    assert result.held_out.n == 90
    assert guard(result)["held_out"].keys() == {"learned", "best", "uniform", "greedy"}


def test_starts_from_loaded_models_are_those_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{name: value.double() for name, value in state.items()} for state in fine_tunes(mlp, 5, spread=0.4)]
    pool = write(tmp_path, states)
    task = Task(mlp().double(), samples(90, dtype=torch.float64))
    plain, from_files = starts(pool, task)
    monkeypatch.setattr(crossfit, "ENOUGH", 80)
    plain_few, from_files_few = starts(pool, task)
    monkeypatch.setattr(learn, "mixes_fast", lambda live: True)
    reads: list[int] = []
    tensor = Pool.tensor

    def read(self: Pool, k: int, name: str) -> Tensor:
        reads.append(k)
        return tensor(self, k, name)

    monkeypatch.setattr(Pool, "tensor", read)
    loaded_few, from_memory_few = starts(pool, task)
    times = len(reads) / (5 * len(pool.specs))
    monkeypatch.setattr(crossfit, "ENOUGH", 2048)
    loaded, from_memory = starts(pool, task)
    assert loaded == plain
    assert loaded_few == plain_few
    for memory, files in ((from_memory, from_files), (from_memory_few, from_files_few)):
        assert (weights_of(memory) - weights_of(files)).abs().max() < 1e-9
        for name, value in guard(files)["held_out"].items():
            assert guard(memory)["held_out"][name] == pytest.approx(value)
    assert times < 6  # the first look, the mean, the block, the soup


def test_how_long_learning_takes_is_told_once(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 3))
    told: list[Event] = []
    cook(pool, Task(mlp(), samples(60)), "crossfit", listen=told.append, **BRIEF)
    paces = [event.data for event in told if event.kind == "pace"]
    assert len(paces) == 1
    assert 0 < paces[0]["steps"] < 3 * 60
    assert paces[0]["seconds"] > 0
    assert paces[0]["greedy"] > 0


# What a fold does.


def test_each_sample_is_scored_by_who_did_not_see_it_and_the_soup_is_the_mean(
    tmp_path: Path, learned: list[Fold]
) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "hl+", **BRIEF)
    assert result.soup is not None
    assert result.held_out is not None
    own = [mixed(fold.state.alpha) for fold in learned]
    assert torch.equal(result.soup.W, torch.stack(own).mean(dim=0))
    assert (own[0] - own[1]).abs().max() > 1e-3
    for W, (inside, outside) in zip(own, task.fit.folds(3, 0), strict=True):
        assert not set(inside.tolist()) & set(outside.tolist())
        Soup(pool, result.soup.layout, W).load_into(task.model)
        assert torch.equal(result.held_out.table[outside], task.score(indices=outside).table)
    assert result.held_out.n == len(task.fit)
    assert not [h for h in result.history if h["kind"] in ("guard", "average")]  # folds from one place, no guard


def test_a_fold_keeps_the_coefficients_that_were_best_on_what_it_left_out(tmp_path: Path, learned: list[Fold]) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "hl+", **{**BRIEF, "lr": 1.0})
    assert result.soup is not None
    stopped_early = 0
    for fold, (_, outside) in zip(learned, task.fit.folds(3, 0), strict=True):
        losses = [h["loss"] for h in folds_of(result, "held_out", fold.number)]
        Soup(pool, result.soup.layout, mixed(fold.state.alpha)).load_into(task.model)
        assert task.score(indices=outside).loss == pytest.approx(min(losses), rel=1e-4)
        assert fold.best_loss == min(losses)
        stopped_early += losses[-1] > min(losses)
    assert stopped_early  # so that it made a difference


def test_held_out_loss_is_the_loss_that_is_learned_with(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    result = cook(pool, task, "hl+", **BRIEF)
    Soup.uniform(pool).load_into(task.model)
    for fold, (_, outside) in enumerate(task.fit.folds(3, 0)):
        first = folds_of(result, "held_out", fold)[0]["loss"]
        with torch.no_grad(), task.evaluating():
            assert first == pytest.approx(float(task.loss(task.fit.batch(outside)).mean), rel=1e-5)


def test_a_step_that_only_hurts_is_not_taken(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    W = weights_of(cook(pool, task, "hl+", **{**BRIEF, "lr": 1e4}))
    assert torch.equal(W, torch.full_like(W, 0.25))


def test_steps_get_smaller_where_held_out_loss_does_not_fall_and_larger_where_it_does(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "hl+", **{**BRIEF, "steps": 90, "lr": 2.0, "folds": 2})
    faster = 0
    for fold in (0, 1):
        mine = [dict(h) for h in result.history if h.get("fold") == fold]
        pace, best = 1.0, math.inf
        for now, after in pairwise(mine):
            if now["kind"] == "held_out":
                better = now["loss"] < best
                best = min(best, now["loss"])
                if now["step"] > 0:
                    pace *= 1.5 if better else 0.5
                    faster += better
            if after["kind"] == "step":
                assert after["lr"] == pytest.approx(pace * 2.0 * (1 + math.cos(math.pi * after["step"] / 90)) / 2)
        assert mine[-1]["kind"] == "held_out"
        assert sum(h["kind"] == "step" for h in mine) < 90, "left at the best it has"
        assert pace * 0.5 <= SLOWEST < pace
    assert faster


def test_judged_is_the_mean_of_the_steps_since_the_last_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = zoo(tmp_path, 4)
    taken: list[list[Tensor]] = [[]]
    told: list[tuple[Tensor, list[Tensor]]] = []
    look, judge = Learner._after_steps, Learner._judged

    def looked(self: Learner, engine: Any, fold: Fold, J: int) -> None:
        taken[-1].append(fold.state.alpha.clone())
        look(self, engine, fold, J)

    def judging(self: Learner, engine: Any, fold: Fold, alpha: Tensor, beta: float | None) -> float:
        told.append((alpha.clone(), taken.pop()))
        taken.append([])
        return judge(self, engine, fold, alpha, beta)

    monkeypatch.setattr(Learner, "_after_steps", looked)
    monkeypatch.setattr(Learner, "_judged", judging)
    cook(pool, task, "hl+", **{**BRIEF, "steps": 150, "lr": 0.5})
    windows = [(alpha, steps) for alpha, steps in told if steps]
    assert len(windows) > 6
    for alpha, steps in windows:
        assert len(steps) == 5  # 150 steps, 30 judgements
        assert torch.allclose(alpha, torch.stack(steps).mean(dim=0), atol=1e-6)


# Where folds set out, and what is averaged.


def members_of(pool: Pool, task: Task, indices: Tensor | None = None) -> tuple[int, ...]:
    problem = Problem(pool, task)
    with problem.live(problem.layout("tensor")) as live:
        return greedy(problem, live, indices=indices, by_content=True).chosen


def test_folds_set_out_from_greedy_soups_that_are_chosen_without_what_they_leave_out(
    tmp_path: Path, learned: list[Fold]
) -> None:
    pool, task = uneven(tmp_path)
    events: list[Event] = []
    cook(pool, task, "crossfit", listen=events.append, **{**BRIEF, "lr": 0.0})
    own = [members_of(pool, task, inside) for inside, _ in task.fit.folds(3, 0)]
    assert len(set(own)) > 1
    assert [fold.start for fold in learned] == own
    assert len([event for event in events if event.kind == "greedy"]) == 3 * 5
    for fold, members in zip(learned, own, strict=True):
        W = mixed(fold.state.alpha)
        assert (W - weights.chosen(6, W.shape[1], members)).abs().max() <= 1e-6  # a rate of zero


def test_it_lowers_the_loss_from_there(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    result = cook(pool, task, "crossfit", **BRIEF)
    for fold in range(3):
        losses = [h["loss"] for h in folds_of(result, "held_out", fold)]
        assert min(losses) < losses[0]


def test_of_ingredients_with_equal_scores_the_same_one_is_chosen_wherever_it_stands(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 4))
    task = Task(mlp(), samples(24), metric=lambda outputs, batch: torch.ones(len(batch[1])))
    chosen = set()
    for first in range(4):
        turned = pool.subset([(first + k) % 4 for k in range(4)])
        chosen.add(tuple(turned.digests()[k] for k in members_of(turned, task)))
    assert len(chosen) == 1


def test_a_continued_run_does_not_choose_again(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    whole = decide(pool, task, "crossfit", **BRIEF)
    store = Memory(float("inf"))
    with pytest.raises(KilledError):
        decide(pool, task, "crossfit", store=store, listen=Killer(70), **BRIEF)
    events: list[Event] = []
    rest = decide(pool, task, "crossfit", store=store, listen=events.append, **BRIEF)
    assert not [event for event in events if event.kind == "greedy"]
    assert torch.equal(weights_of(whole), weights_of(rest))


def fold(number: int, held_out: int, task: Task, start: tuple[int, ...] | None) -> Fold:
    made = Fold(number, task.fit, task.fit.subset(torch.arange(held_out)), start)
    made.state = State(torch.zeros(6, 1))
    return made


def test_what_has_a_hill_between_is_not_averaged(tmp_path: Path) -> None:
    _, task = zoo(tmp_path, 2)
    folds = [fold(0, 10, task, (1,)), fold(1, 20, task, None), fold(2, 30, task, (1,))]  # 1 and 3 from one place
    kept, record, note = without_hill(folds, [0.4, 0.6, 0.8], 1.0)
    assert kept == [folds[1]]
    assert record == {
        "together": 1.0,
        "apart": {"folds 1, 3": pytest.approx(0.7), "fold 2": pytest.approx(0.6)},
        "kept": "fold 2",
    }
    assert note == (
        "only fold 2 is in this soup: the average of all folds has a loss of 1 on the fitting data, the folds"
        " themselves 0.6667 on what they left out",
    )
    kept, _, _ = without_hill(folds, [0.4, 0.6, 0.6], 1.0)
    assert kept == [folds[0], folds[2]]
    for loss, whole in ((0.56, True), (0.57, False), (math.nan, False)):  # 0.567 over all samples
        assert (without_hill(folds, [0.4, 0.6, 0.6], loss)[0] == folds) is whole
    # Nothing to compare with: no reason to doubt.
    assert without_hill(folds, [math.nan] * 3, 1.0)[0] == folds


def test_the_average_is_asked_for_its_loss_on_all_fitting_data(tmp_path: Path, learned: list[Fold]) -> None:
    pool, task = uneven(tmp_path)
    events: list[Event] = []
    result = cook(pool, task, "crossfit", listen=events.append, **BRIEF)
    (record,) = [h for h in result.history if h["kind"] == "average"]
    assert [event.data["kept"] for event in events if event.kind == "average"] == [record["kept"]]
    layout = Problem(pool, task).layout("tensor")
    everything = torch.stack([mixed(one.state.alpha) for one in learned]).mean(dim=0)
    Soup(pool, layout, everything).load_into(task.model)
    assert record["together"] == pytest.approx(task.score().loss, rel=1e-4)
    for one, (_, outside) in zip(learned, task.fit.folds(3, 0), strict=True):
        Soup(pool, layout, mixed(one.state.alpha)).load_into(task.model)
        if len([other for other in learned if other.start == one.start]) == 1:
            told = record["apart"][f"fold {one.number + 1}"]
            assert told == pytest.approx(task.score(indices=outside).loss, rel=1e-4)


def test_the_average_has_the_mean_of_the_betas(tmp_path: Path, learned: list[Fold]) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "hl+", **{**BRIEF, "beta": True, "lr": 0.2})
    betas = [one.state.beta for one in learned]
    assert result.soup is not None
    assert len(set(betas)) == 3
    assert result.soup.about["beta"] == sum(b for b in betas if b is not None) / 3


# The guard.


def one_good_model(folder: Path) -> tuple[Pool, Task]:
    good = fine_tunes(mlp, 1, steps=300, spread=0.0)[0]
    noise = torch.Generator().manual_seed(0)
    bad = [{n: v + 3 * torch.randn(v.shape, generator=noise) for n, v in good.items()} for _ in range(3)]
    return write(folder, [bad[0], good, *bad[1:]]), Task(mlp(), samples(60))


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
    decision = guard(result)
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


@pytest.mark.parametrize("winner", ["uniform", "greedy"])
def test_whoever_wins_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, winner: str) -> None:
    pool, task = uneven(tmp_path)
    monkeypatch.setattr(crossfit, "judged", lambda known: {**judged(known), "winner": winner})
    W = weights_of(cook(pool, task, "crossfit", **{**BRIEF, "beta": True}))
    members = range(6) if winner == "uniform" else members_of(pool, task)
    assert torch.equal(W, weights.chosen(6, W.shape[1], members))


def test_the_guards_own_soups_are_chosen_without_the_samples_they_are_scored_on(tmp_path: Path) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 8, seed=3)), Task(mlp(), samples())
    decision = guard(cook(pool, task, "crossfit", **{**BRIEF, "steps": 4}))
    own = torch.stack([one.table[:, 0] for one in Problem(pool, task).individual()])  # (K, n)
    best, greedy = torch.empty(48, dtype=torch.float64), torch.empty(48, dtype=torch.float64)
    for inside, outside in task.fit.folds(3, 0):
        best[outside] = own[own[:, inside].mean(dim=1).argmax(), outside]
        W = weights.chosen(8, 1, members_of(pool, task, inside))
        Soup(pool, Problem(pool, task).layout("model"), W).load_into(task.model)
        greedy[outside] = task.score(indices=outside).table[:, 0]
    assert decision["held_out"]["best"] == float(best.mean())
    assert best.mean() != own.mean(dim=1).max()  # choosing on all samples would have looked different
    assert decision["held_out"]["greedy"] == float(greedy.mean())
    Soup.uniform(pool).load_into(task.model)
    assert decision["held_out"]["uniform"] == task.score().value
    for name in ("best", "uniform", "greedy"):
        mean, low, high = decision["over_learned"][name]
        assert mean == pytest.approx(decision["held_out"][name] - decision["held_out"]["learned"])
        assert low < mean < high


def test_what_the_guard_found_out_about_others_is_their_held_out_score(tmp_path: Path) -> None:
    from stockpot import compare

    pool, task = uneven(tmp_path)
    found = compare(pool, task, ["best", "uniform", "hl+", "crossfit"], each={"crossfit": BRIEF}, steps=4)
    decision = guard(found["crossfit"])
    for name in ("best", "uniform"):
        held_out = found[name].held_out
        assert held_out is not None
        assert held_out.value == decision["held_out"][name]
    assert found["hl+"].held_out is None


@pytest.mark.parametrize(("more", "winner"), [(0, "learned"), (16, "learned"), (21, "learned"), (26, "best")])
def test_the_guard_steps_in_beyond_chance_only(more: int, winner: str) -> None:
    """Of 1,000 samples, 30 are right by the learned soup alone and 30 + `more` by the best ingredient alone.

    21 more would do for one comparison (p = 0.026); there are three.
    """
    learned, best = torch.ones(1000), torch.ones(1000)
    best[:30] = 0
    learned[30 : 60 + more] = 0
    known = {"learned": learned, "best": best, "uniform": torch.zeros(1000), "greedy": learned.clone()}
    decision = judged({name: scores(values) for name, values in known.items()})
    assert decision["winner"] == winner
    assert decision["over_learned"]["best"][0] == pytest.approx(more / 1000)


def test_of_several_that_are_better_the_guard_takes_the_best() -> None:
    right = {"learned": 500, "best": 700, "uniform": 900, "greedy": 800}
    assert judged({name: scores(torch.arange(1000) < n) for name, n in right.items()})["winner"] == "uniform"


def test_a_score_that_is_no_number_does_not_win_against_the_guard() -> None:
    known = {
        "learned": scores(torch.full((50,), torch.nan)),
        "best": scores(torch.ones(50)),
        "uniform": scores(torch.zeros(50)),
    }
    decision = judged(known)
    assert decision["winner"] == "best"
    assert decision["held_out"]["learned"] is None  # plain JSON


def test_equal_scores_keep_the_learned_soup(tmp_path: Path) -> None:
    """Where every sample is right whatever is done, there is no reason to fall back."""
    pool = write(tmp_path, fine_tunes(mlp, 3, steps=0))
    task = Task(mlp(), samples(24), metric=lambda outputs, batch: torch.ones(len(batch[1])))
    assert guard(cook(pool, task, "crossfit", **BRIEF))["winner"] == "learned"


def test_the_guard_works_for_a_metric_that_is_no_mean(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path, 4)
    result = cook(pool, Task(mlp(), samples(), metric="macro_f1"), "crossfit", **BRIEF)
    decision = guard(result)
    assert result.held_out is not None
    assert result.held_out.metric.name == "macro_f1"
    assert decision["intervals"]["learned"][0] < decision["held_out"]["learned"] < decision["intervals"]["learned"][1]


def test_parts_come_together_in_the_order_of_the_whole() -> None:
    places = [torch.tensor([3, 0]), torch.tensor([1, 2])]
    parts = [scores(torch.tensor([30.0, 0.0])), scores(torch.tensor([10.0, 20.0]))]
    assert together(parts, places).table[:, 0].tolist() == [0, 10, 20, 30]


def test_without_folds_there_is_nothing_to_guard_by(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    settings = {**BRIEF, "folds": 1, "steps": 4}
    result = cook(pool, task, "crossfit", **settings)
    assert result.held_out is None
    assert torch.equal(weights_of(result), weights_of(cook(pool, task, "mehl+", **settings)))
