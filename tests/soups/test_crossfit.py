"""Cross-fitting: what is held out is really held out, and the guard believes it where it says more than chance does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resuming import KilledError, Killer, Memory
from torch import Tensor, nn

from stockpot import Event, Result, Soup, Task, cook
from stockpot.engine import Engine
from stockpot.pool import Pool
from stockpot.soup import weights
from stockpot.soups import crossfit, learn
from stockpot.soups.crossfit import best_start, judged, together
from stockpot.soups.fold import Fold
from stockpot.soups.learn import Learner
from stockpot.soups.mehl import weights as mixed
from stockpot.soups.problem import Problem
from stockpot.soups.stopping import TRIES, earliest, verdict
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


def start_of(pool: Pool, task: Task) -> tuple[int, ...]:
    problem = Problem(pool, task)
    with problem.live(problem.layout("tensor")) as live:
        few = crossfit.enough(torch.arange(len(task.fit)), 0)
        return best_start(problem, live, task.fit.folds(3, 0), few, None)


def test_start_and_stopping_of_large_data_are_decided_on_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 5, spread=0.4))
    task = Task(mlp(), samples(90))
    judged_on: list[int] = []
    scored_on: list[int] = []
    loss_on, score_live = Engine.loss_on, Problem.score_live

    def watched(self: Engine, data: Data, beta: float | None) -> float:
        judged_on.append(len(data))
        return loss_on(self, data, beta)

    def scoring(self: Problem, *args: Any, **options: Any) -> Scores:
        scored_on.append(90 if options.get("indices") is None else len(options["indices"]))
        return score_live(self, *args, **options)

    monkeypatch.setattr(crossfit, "ENOUGH", 20)
    monkeypatch.setattr(Engine, "loss_on", watched)
    monkeypatch.setattr(Problem, "score_live", scoring)
    result = cook(pool, task, "crossfit", **BRIEF)
    assert sum(judged_on[:3]) == 20  # of 90 left out
    assert sum(scored_on[:3]) == 20  # a start
    assert result.held_out is not None
    assert result.held_out.n == 90
    assert guard(result)["held_out"].keys() == {"learned", "best", "uniform"}


def test_starts_from_loaded_models_are_those_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{name: value.double() for name, value in state.items()} for state in fine_tunes(mlp, 5, spread=0.4)]
    pool = write(tmp_path, states)
    task = Task(mlp().double(), samples(90, dtype=torch.float64))
    from_files = cook(pool, task, "crossfit", **BRIEF)
    monkeypatch.setattr(crossfit, "ENOUGH", 80)
    from_files_few = cook(pool, task, "crossfit", **BRIEF)
    monkeypatch.setattr(learn, "mixes_fast", lambda live: True)
    reads: list[int] = []
    tensor = Pool.tensor

    def read(self: Pool, k: int, name: str) -> Tensor:
        reads.append(k)
        return tensor(self, k, name)

    monkeypatch.setattr(Pool, "tensor", read)
    from_memory_few = cook(pool, task, "crossfit", **BRIEF)
    times = len(reads) / (5 * len(pool.specs))
    monkeypatch.setattr(crossfit, "ENOUGH", 2048)
    from_memory = cook(pool, task, "crossfit", **BRIEF)
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


def unseen_soups(learned: list[Fold]) -> list[Tensor]:
    """What the guard scores, of one block."""
    found = []
    for fold in learned:
        assert fold.unseen is not None
        found.append(mixed(fold.unseen))
    return found


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
    for W, (inside, outside) in zip(unseen_soups(learned), task.fit.folds(3, 0), strict=True):
        assert not set(inside.tolist()) & set(outside.tolist())
        Soup(pool, result.soup.layout, W).load_into(task.model)
        assert torch.equal(result.held_out.table[outside], task.score(indices=outside).table)
    assert result.held_out.n == len(task.fit)
    assert not [h for h in result.history if h["kind"] == "guard"]


def held_out_losses(result: Result, folds: int) -> list[list[float]]:
    return [[h["loss"] for h in folds_of(result, "held_out", fold)] for fold in range(folds)]


def test_folds_keep_what_was_best_for_all_and_are_scored_at_what_was_best_for_the_others(
    tmp_path: Path, learned: list[Fold]
) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "hl+", **{**BRIEF, "lr": 0.5, "steps": 300})
    assert result.soup is not None
    losses = torch.tensor(held_out_losses(result, 3))  # (folds, judgements); all leave out equally many
    best = int(losses.mean(dim=0).argmin())
    assert 0 < best < losses.shape[1] - 1, "it made a difference"
    others = [int((losses.sum(dim=0) - losses[fold]).argmin()) for fold in range(3)]
    assert set(others) != {best}
    for fold, own, (_, outside) in zip(learned, unseen_soups(learned), task.fit.folds(3, 0), strict=True):
        for W, judgement in ((mixed(fold.state.alpha), best), (own, others[fold.number])):
            Soup(pool, result.soup.layout, W).load_into(task.model)
            wanted = float(losses[fold.number, judgement])
            assert task.score(indices=outside).loss == pytest.approx(wanted, rel=1e-4)


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


def test_the_losses_say_which_is_best_how_fast_to_go_and_when_to_stop() -> None:
    J = 1000
    assert verdict([3.0], J).best == 0
    assert verdict([3.0, 2.0], J) == verdict([9.0, 1.0], J)
    found = verdict([3.0, 2.0, 1.0, 1.0], J)  # no lower is no better
    assert (found.best, found.pace, found.over) == (2, 1.5 * 1.5 * 0.5, False)
    assert not verdict([3.0, 4.0, 4.0], J).over
    assert verdict([3.0, 4.0, 4.0, 4.0], J).over
    assert not verdict([3.0, 4.0, 4.0, 2.0, 4.0, 4.0], J).over
    assert verdict([math.inf, math.inf, 2.0], J).best == 2
    assert verdict([1.0 / i for i in range(1, 99)], J).pace == 2.0**10


def test_folds_are_judged_after_a_tenth_more_steps_and_later_after_twice_as_many_where_nothing_was_gained() -> None:
    falling = [1.0 / i for i in range(1, 40)]
    assert [verdict(falling[:n], 1000).next for n in (0, 1, 10, 11, 19, 20)] == [0, 10, 100, 110, 233, 256]
    assert [verdict([*falling[:3], *[9.0] * n], 1000).next for n in range(3)] == [30, 50, 90]
    assert verdict([3.0, 2.0, 9.0, 1.0], 1000).next == 50  # better again: ten
    assert verdict(falling, 300).next == 300


def test_the_earliest_end_is_that_of_losses_that_do_not_fall_any_more() -> None:
    for losses in ((), (3.0,), (3.0, 2.0, 1.0), (3.0, 2.0, 4.0)):
        found = [*(losses or (3.0,))]
        while not verdict(found, 1000).over:
            found.append(9.0)
        assert earliest(losses, 1000) == verdict(found[:-1], 1000).next
    assert earliest((3.0,), 7) == 7
    assert earliest((3.0, 2.0, 1.0), 40) == 40


def test_all_folds_get_slower_where_held_out_loss_does_not_fall_and_faster_where_it_does(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "hl+", **{**BRIEF, "steps": 300, "lr": 0.5, "folds": 2})
    losses = held_out_losses(result, 2)
    assert len(losses[0]) == len(losses[1])
    means = [(a + b) / 2 for a, b in zip(*losses, strict=True)]
    for fold in (0, 1):
        paces = {}  # after a judgement
        judgement = -1
        for h in result.history:
            if h.get("fold") == fold:
                judgement += h["kind"] == "held_out"
                if h["kind"] == "step":
                    paces[judgement] = h["lr"] / 0.5
        for judgement, pace in paces.items():
            assert pace == pytest.approx(verdict(means[: judgement + 1], 300).pace)
        assert max(paces.values()) > 1 > min(paces.values())
    assert verdict(means, 300).over, "left where nothing was gained"
    assert means.index(min(means)) == len(means) - 1 - TRIES


def test_judged_is_the_mean_of_the_steps_since_the_last_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = zoo(tmp_path, 4)
    taken: list[list[Tensor]] = [[]]
    told: list[tuple[Tensor, list[Tensor]]] = []
    look, judge = Learner._after_steps, Learner._loss_held_out

    def looked(self: Learner, engine: Any, fold: Fold) -> None:
        taken[-1].append(fold.state.alpha.clone())
        look(self, engine, fold)

    def judging(self: Learner, engine: Any, fold: Fold) -> float:
        assert fold.judged is not None
        told.append((fold.judged["x"].view_as(fold.state.alpha), taken.pop()))
        taken.append([])
        return judge(self, engine, fold)

    monkeypatch.setattr(Learner, "_after_steps", looked)
    monkeypatch.setattr(Learner, "_loss_held_out", judging)
    cook(pool, task, "hl+", **{**BRIEF, "steps": 150, "lr": 0.5})
    windows = [(alpha, steps) for alpha, steps in told if steps]
    assert len(windows) >= 6
    for alpha, steps in windows:
        assert len(steps) in (10, 20, 40)
        assert torch.allclose(alpha, torch.stack(steps).mean(dim=0), atol=1e-6)


# Where folds set out, and what is averaged.


def test_folds_set_out_from_the_best_half_or_quarter_where_more_are_worse_beyond_chance(
    tmp_path: Path, learned: list[Fold]
) -> None:
    pool, task = one_good_model(tmp_path)
    assert start_of(pool, task) == (1,)
    cook(pool, task, "crossfit", **{**BRIEF, "lr": 0.0})
    for fold in learned:
        W = mixed(fold.state.alpha)
        assert (W - weights.chosen(4, W.shape[1], [1])).abs().max() <= 1e-6  # a rate of zero
    pool, task = write(tmp_path / "alike", fine_tunes(mlp, 4, steps=0, spread=0.02)), Task(mlp(), samples())
    assert sorted(start_of(pool, task)) == [0, 1, 2, 3]


def test_a_lead_of_the_best_half_that_may_be_chance_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 4, seed=4, spread=0.4)), Task(mlp(), samples(30))
    assert sorted(start_of(pool, task)) == [0, 1, 2, 3]
    difference = Scores.difference
    monkeypatch.setattr(Scores, "difference", lambda *args: (difference(*args)[0],) * 3)
    assert len(start_of(pool, task)) == 2, "it has a lead"


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
        chosen.add(tuple(turned.digests()[k] for k in start_of(turned, task)))
    assert len(chosen) == 1


def test_a_continued_run_does_not_choose_again(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    whole = decide(pool, task, "crossfit", **BRIEF)
    store = Memory(-1.0)
    with pytest.raises(KilledError):
        decide(pool, task, "crossfit", store=store, listen=Killer(70), **BRIEF)
    events: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossfit, "best_start", lambda *_: pytest.fail("it began again"))
        rest = decide(pool, task, "crossfit", store=store, listen=events.append, **BRIEF)
    assert torch.equal(weights_of(whole), weights_of(rest))


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


def test_a_loss_with_the_wrong_sign_does_not_cost_the_accuracy_that_the_ingredients_have(tmp_path: Path) -> None:
    def wrong(model: nn.Module, batch: Any) -> Tensor:
        return -nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none").clamp(max=5)

    pool = write(tmp_path, fine_tunes(mlp, 4, steps=200))
    task = Task(mlp(), samples(200), loss=wrong, metric="accuracy")
    result = cook(pool, task, "crossfit", **BRIEF)
    held_out = guard(result)["held_out"]
    assert held_out["learned"] < held_out["best"] - 0.1
    assert guard(result)["winner"] in ("best", "uniform")
    result.soup.load_into(task.model)  # type: ignore[union-attr]
    assert task.score().value > 0.8


def test_whoever_wins_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = uneven(tmp_path)
    monkeypatch.setattr(crossfit, "judged", lambda known: {**judged(known), "winner": "uniform"})
    W = weights_of(cook(pool, task, "crossfit", **{**BRIEF, "beta": True}))
    assert torch.equal(W, weights.uniform(6, W.shape[1]))


def test_the_guards_own_soups_are_chosen_without_the_samples_they_are_scored_on(tmp_path: Path) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 8, seed=3)), Task(mlp(), samples())
    decision = guard(cook(pool, task, "crossfit", **{**BRIEF, "steps": 4}))
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
    decision = guard(found["crossfit"])
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
    decision = judged({name: scores(values) for name, values in known.items()})
    assert decision["winner"] == winner
    assert decision["over_learned"]["best"][0] == pytest.approx(more / 1000)


def test_of_several_that_are_better_the_guard_takes_the_best() -> None:
    right = {"learned": 500, "best": 700, "uniform": 900}
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


# Time.


@pytest.mark.parametrize("method", ["crossfit", "hl+"])
def test_a_budget_is_kept_and_the_best_so_far_is_returned(tmp_path: Path, method: str) -> None:
    pool, task = zoo(tmp_path, 4)
    settings: dict[str, Any] = {"batch_size": 1, "lr": 1e-4, "steps": 10**6}
    result = cook(pool, task, method, budget=1.0, **settings)
    assert result.seconds < 1.5
    taken = [h for h in result.history if h["kind"] == "step"]
    assert len(taken) >= 40
    assert (weights_of(result) - 0.25).abs().max() > 0
    assert "its budget of 1 s ended learning before it would have stopped" in result.notes


def test_a_budget_that_is_long_enough_changes_nothing(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    plain, limited = (cook(pool, task, "crossfit", **{**BRIEF, "budget": budget}) for budget in (None, 600.0))
    assert torch.equal(weights_of(plain), weights_of(limited))
    assert plain.notes == limited.notes


@pytest.mark.parametrize("method", ["crossfit", "hl+"])
def test_an_interruption_carries_the_best_so_far(tmp_path: Path, method: str) -> None:
    pool, task = zoo(tmp_path, 4)
    steps: list[Event] = []

    def listen(event: Event) -> None:
        steps.extend([event] * (event.kind == "step"))
        if len(steps) == 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        cook(pool, task, method, listen=listen, batch_size=16, lr=0.02)
    best = caught.value.best  # type: ignore[attr-defined]
    assert isinstance(best, Soup)
    assert best.about["stopped"] == "interrupted"
    best.load_into(task.model)
    interrupted = task.score().loss
    Soup.uniform(pool).load_into(task.model)
    assert interrupted < task.score().loss
