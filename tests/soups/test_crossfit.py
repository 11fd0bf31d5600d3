"""Cross-fitting: where folds set out, what they are judged on, and what is averaged."""

from __future__ import annotations

from collections.abc import Sequence
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
from stockpot.soups import crossfit, judging, stopping
from stockpot.soups.crossfit import best_start
from stockpot.soups.fold import Fold, halves_of
from stockpot.soups.judging import FoldLearner
from stockpot.soups.learn import Learner
from stockpot.soups.mehl import weights as mixed
from stockpot.soups.problem import Problem
from stockpot.soups.stopping import verdict
from stockpot.task import Data, Scores
from zoo import decide, fine_tunes, guard_of, mlp, one_good_model, samples, uneven, weights_of, write, zoo

BRIEF: dict[str, Any] = {"steps": 60, "batch_size": 16, "lr": 0.1, "folds": 3}


def folds_of(result: Result, kind: str, fold: int) -> list[dict[str, Any]]:
    return [dict(h) for h in result.history if h["kind"] == kind and h["fold"] == fold]


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


def test_of_every_part_that_a_fold_leaves_out_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is a group of one sample among many others."""
    groups = [100 + i if i < 4 else i % 4 for i in range(200)]
    task = Task(mlp(), samples(200), groups=groups)
    assert task.fit.groups is not None
    smallest = len(groups)
    for _, outside in task.fit.folds(4, 0):
        halves = halves_of(task.fit, outside)
        assert sorted(torch.cat(halves).tolist()) == sorted(outside.tolist())
        ids = [set(task.fit.groups[half].tolist()) for half in halves]
        assert sum(len(one) for one in ids) == len(set.union(*ids)), "a group is in one half"
        smallest = min(smallest, *map(len, halves))
    assert smallest == 1
    monkeypatch.setattr(crossfit, "ENOUGH", 12)
    result = cook(write(tmp_path, fine_tunes(mlp, 4)), task, "crossfit", **{**BRIEF, "folds": 4})
    assert result.held_out is not None
    assert result.held_out.n == 200


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
    assert sum(judged_on[:6]) == 20  # of 90 left out, in two parts by each fold
    assert sum(scored_on[:3]) == 20  # a start
    assert result.held_out is not None
    assert result.held_out.n == 90
    assert guard_of(result)["held_out"].keys() == {"learned", "best", "uniform"}


def test_starts_from_loaded_models_are_those_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{name: value.double() for name, value in state.items()} for state in fine_tunes(mlp, 5, spread=0.4)]
    pool = write(tmp_path, states)
    task = Task(mlp().double(), samples(90, dtype=torch.float64))
    from_files = cook(pool, task, "crossfit", **BRIEF)
    monkeypatch.setattr(crossfit, "ENOUGH", 80)
    from_files_few = cook(pool, task, "crossfit", **BRIEF)
    monkeypatch.setattr(judging, "mixes_fast", lambda live: True)
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
        for name, value in guard_of(files)["held_out"].items():
            assert guard_of(memory)["held_out"][name] == pytest.approx(value)
    assert times < 6  # the first look, the mean, the block, the soup


# What a fold does.


def left_out(task: Task) -> list[tuple[int, Tensor, Tensor]]:
    """What each of three folds leaves out, part by part: who, which samples, and the others that it leaves out."""
    found = []
    for fold, (inside, outside) in enumerate(task.fit.folds(3, 0)):
        assert not set(inside.tolist()) & set(outside.tolist())
        found += [(fold, outside[part::2], outside[1 - part :: 2]) for part in (0, 1)]
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
    unseen_soups = [unseen for fold in learned for unseen in fold.unseen]
    for (_, part, _), unseen in zip(left_out(task), unseen_soups, strict=True):
        Soup(pool, result.soup.layout, mixed(unseen)).load_into(task.model)
        assert torch.equal(result.held_out.table[part], task.score(indices=part).table)
    assert result.held_out.n == len(task.fit)
    assert not [h for h in result.history if h["kind"] == "guard"]


def held_out_losses(result: Result, folds: int) -> list[list[float]]:
    return [[h["loss"] for h in folds_of(result, "held_out", fold)] for fold in range(folds)]


def test_folds_keep_what_was_best_for_all_and_each_part_is_scored_at_what_was_best_for_the_other(
    tmp_path: Path, learned: list[Fold], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = zoo(tmp_path, 5)
    soups: list[list[Tensor]] = [[], [], []]  # that were judged, by fold
    judge = FoldLearner._loss_held_out

    def watched(self: FoldLearner, engine: Engine, fold: Fold) -> list[float]:
        assert fold.judged is not None
        soups[fold.number].append(mixed(fold.judged["x"].view_as(fold.state.alpha)))
        return judge(self, engine, fold)

    monkeypatch.setattr(FoldLearner, "_loss_held_out", watched)
    result = cook(pool, task, "hl+", **{**BRIEF, "lr": 0.5, "steps": 300})
    assert result.soup is not None

    def loss_of(W: Tensor, rows: Tensor) -> float:
        assert result.soup is not None
        Soup(pool, result.soup.layout, W).load_into(task.model)
        return task.score(indices=rows).loss

    losses = torch.tensor(held_out_losses(result, 3))  # (folds, judgements); all leave out equally many
    best = int(losses.mean(dim=0).argmin())
    assert 0 < best < losses.shape[1] - 1, "it made a difference"
    chosen = set()
    for number, part, other in left_out(task):
        on_other = [loss_of(W, other) for W in soups[number]]
        chosen.add(on_other.index(min(on_other)))
        W = soups[number][on_other.index(min(on_other))]
        assert result.held_out is not None
        Soup(pool, result.soup.layout, W).load_into(task.model)
        assert torch.equal(result.held_out.table[part], task.score(indices=part).table)
        assert torch.allclose(mixed(learned[number].state.alpha), soups[number][best], atol=1e-6)
    assert chosen != {best}


def test_held_out_loss_is_the_loss_that_is_learned_with(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    result = cook(pool, task, "hl+", **BRIEF)
    Soup.uniform(pool).load_into(task.model)
    for fold, (_, outside) in enumerate(task.fit.folds(3, 0)):
        first = folds_of(result, "held_out", fold)[0]["loss"]
        with torch.no_grad(), task.evaluating():
            assert first == pytest.approx(float(task.loss(task.fit.batch(outside)).mean), rel=1e-5)


def test_a_step_that_only_hurts_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = zoo(tmp_path, 4)
    monkeypatch.setattr(stopping, "RATE", 1e3)
    W = weights_of(cook(pool, task, "hl+", **BRIEF))
    assert torch.equal(W, torch.full_like(W, 0.25))


def test_all_folds_find_a_rate_and_get_slower_where_held_out_loss_does_not_fall_and_faster_where_it_does(
    tmp_path: Path,
) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "hl+", **{**BRIEF, "steps": 300, "lr": 0.1, "folds": 2})
    losses = held_out_losses(result, 2)
    assert len(losses[0]) == len(losses[1])
    means = [(a + b) / 2 for a, b in zip(*losses, strict=True)]
    for fold in (0, 1):
        rates = {}  # after a judgement
        judgement = -1
        for h in result.history:
            if h.get("fold") == fold:
                judgement += h["kind"] == "held_out"
                if h["kind"] == "step":
                    rates[judgement] = h["lr"]
        for judgement, rate in rates.items():
            assert rate == pytest.approx(verdict(means[: judgement + 1], 300, 0.1).rate)
        assert rates[0] == pytest.approx(0.01 * 2**3), "the nearest to 0.1 that is tried"
        assert len(set(rates.values())) > 2
    assert verdict(means, 300, 0.1).over, "left where nothing was gained"
    assert not verdict(means[:-1], 300, 0.1).over


def test_the_given_rate_is_only_where_the_search_for_one_begins(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    found = [cook(pool, task, "crossfit", **{**BRIEF, "steps": 300, "lr": lr}) for lr in (0.002, 0.01, 0.1)]
    for other in found[1:]:
        assert (weights_of(found[0]) - weights_of(other)).abs().max() < 1e-5
    assert (weights_of(found[0]) - 0.2).abs().max() > 1e-2
    rates = [[h["lr"] for h in folds_of(one, "step", 0)] for one in found]
    assert len({one[0] for one in rates}) == 3


def test_judged_is_the_mean_of_the_steps_since_the_last_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = zoo(tmp_path, 4)
    taken: list[list[Tensor]] = [[]]
    told: list[tuple[Tensor, list[Tensor]]] = []
    look, judge = Learner._after_steps, FoldLearner._loss_held_out

    def looked(self: Learner, engine: Any, fold: Fold) -> None:
        taken[-1].append(fold.state.alpha.clone())
        look(self, engine, fold)

    def judge_noted(self: FoldLearner, engine: Any, fold: Fold) -> list[float]:
        assert fold.judged is not None
        told.append((fold.judged["x"].view_as(fold.state.alpha), taken.pop()))
        taken.append([])
        return judge(self, engine, fold)

    monkeypatch.setattr(Learner, "_after_steps", looked)
    monkeypatch.setattr(FoldLearner, "_loss_held_out", judge_noted)
    cook(pool, task, "hl+", **{**BRIEF, "steps": 150, "lr": 0.5})
    windows = [(alpha, steps) for alpha, steps in told if steps]
    assert len(windows) >= 6
    for alpha, steps in windows:
        assert len(steps) >= 5
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


@pytest.mark.parametrize(("members", "mixed_from"), [((1, 0, 2), {0}), ((3, 0, 3), {0, 3})])
def test_folds_with_a_hill_between_them_are_not_averaged_but_the_best_is_returned(
    members: Sequence[int], mixed_from: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden units that change their signs change nothing; the mean with those that do not is constant."""
    good, other = fine_tunes(mlp, 2, steps=200)
    worse = {name: 0.5 * value for name, value in good.items()}
    turned = [{n: -v if n != "2.bias" else v for n, v in one.items()} for one in (worse, worse)]
    pool, task = write(tmp_path, [good, *turned, other]), Task(mlp(), samples())
    finish, loss_on, training = FoldLearner._finish, Engine.loss_on, []

    def apart(self: FoldLearner, engine: Engine) -> None:
        for fold, member in zip(self.folds, members, strict=True):
            fold.state.alpha.fill_(-0.25)[member] = 0.75
        self.live.task.model.train()
        finish(self, engine)

    def watched(self: Engine, *args: Any) -> float:
        training.append(self.live.task.model.training)
        return loss_on(self, *args)

    monkeypatch.setattr(FoldLearner, "_finish", apart)
    monkeypatch.setattr(Engine, "loss_on", watched)
    result = cook(pool, task, "hl+", **BRIEF)
    found = {k for k in range(4) if weights_of(result)[k].min() > 0.1}
    assert found == mixed_from
    assert not any(training), "with dropout it would be chance"
    assert any("so far apart that their average is worse" in note for note in result.notes) == (len(mixed_from) == 1)
