"""Cross-fitting: what is held out is really held out, and the guard believes it where it says more than chance does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot import Event, Result, Soup, Task, cook
from stockpot.pool import Pool
from stockpot.soup import weights
from stockpot.soups import guard as guarding
from stockpot.soups.guard import could_change, judged
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.learn import Learner
from stockpot.soups.settings import settings_for
from stockpot.soups.track import Track
from stockpot.task import Scores
from zoo import fine_tunes, mlp, samples, write, zoo

BRIEF: dict[str, Any] = {
    "steps": 12,
    "batch_size": 16,
    "lr": 0.1,
    "folds": 3,
    "block_size": 2,
    "evaluations": 4,
    "start": "mean",  # test_method_start.py has the other one
}


def tracks_of(pool: Pool, task: Task, **settings: Any) -> tuple[list[Track], list[tuple[Tensor, Tensor]]]:
    chosen = settings_for("crossfit", **settings)
    kitchen = Kitchen(pool, task)
    folds = task.fit.folds(chosen.folds, chosen.seed)
    tracks = [
        Track(f, task.fit.subset(inside), task.fit.subset(out)) for f, (inside, out) in enumerate(folds)
    ]
    with kitchen.live(kitchen.layout(chosen.granularity)) as live:
        Learner(live, chosen, tracks).run()
    return tracks, folds


def soup_of(result: Result) -> Soup:
    assert result.soup is not None
    return result.soup


def guard(result: Result) -> dict[str, Any]:
    return dict(next(h for h in result.history if h["kind"] == "guard"))


def test_the_soup_is_the_mean_of_the_folds_and_each_sample_is_scored_by_who_did_not_see_it(
    tmp_path: Path,
) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "crossfit", guard=False, **BRIEF)
    tracks, folds = tracks_of(pool, task, guard=False, **BRIEF)
    W = torch.stack([track.W for track in tracks]).mean(dim=0)
    assert torch.equal(soup_of(result).W, W)
    assert len({track.W.sum() for track in tracks} | {float(track.W[0, 0]) for track in tracks}) > 1
    assert result.held_out is not None
    for track, (inside, outside) in zip(tracks, folds, strict=True):
        assert not set(inside.tolist()) & set(outside.tolist())
        Soup(pool, soup_of(result).layout, track.W).load_into(task.model)
        assert torch.equal(result.held_out.values[outside], task.score(indices=outside).values)
    assert result.held_out.n == len(task.fit)


def test_a_fold_keeps_the_coefficients_that_were_best_on_what_it_left_out(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    settings = {**BRIEF, "lr": 1.0, "schedule": "constant", "block_size": 5, "retreat": False}
    result = cook(pool, task, "crossfit", guard=False, **settings)
    tracks, folds = tracks_of(pool, task, guard=False, **settings)
    stopped_early = 0
    for track, (_, outside) in zip(tracks, folds, strict=True):
        losses = [h["loss"] for h in result.history if h["kind"] == "held_out" and h["fold"] == track.number]
        Soup(pool, soup_of(result).layout, track.W).load_into(task.model)
        assert abs(task.score(indices=outside).loss - min(losses)) <= 1e-5
        stopped_early += losses[-1] > min(losses)
    assert stopped_early  # so that it made a difference


def test_held_out_loss_is_the_loss_that_is_learned_with(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    result = cook(pool, task, "crossfit", guard=False, **{**BRIEF, "label_smoothing": 0.3})
    Soup.uniform(pool).load_into(task.model)
    for fold, (_, outside) in enumerate(task.fit.folds(3, 0)):
        first = next(h["loss"] for h in result.history if h["kind"] == "held_out" and h["fold"] == fold)
        with torch.no_grad(), task.evaluating():
            batch = task.fit.batch(outside)
            assert first == pytest.approx(float(task.loss(batch, label_smoothing=0.3)), rel=1e-5)
            assert abs(first - float(task.loss(batch))) > 1e-3


def test_a_step_that_only_hurts_is_not_taken(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    result = cook(pool, task, "crossfit", guard=False, **{**BRIEF, "lr": 1e4, "schedule": "constant"})
    assert torch.equal(soup_of(result).W, torch.full_like(soup_of(result).W, 0.25))


def test_the_guard_prefers_what_scores_higher_on_held_out_data(tmp_path: Path) -> None:
    good = fine_tunes(mlp, 1, steps=300, spread=0.0)[0]
    noise = torch.Generator().manual_seed(0)
    bad = [{n: v + 3 * torch.randn(v.shape, generator=noise) for n, v in good.items()} for _ in range(3)]
    pool, task = write(tmp_path, [bad[0], good, *bad[1:]]), Task(mlp(), samples(60))
    events: list[Event] = []
    result = cook(pool, task, "crossfit", listen=events.append, **{**BRIEF, "lr": 1e-6})
    decision = guard(result)
    assert decision["winner"] == "best"
    assert decision["held_out"]["best"] > decision["held_out"]["learned"]
    assert torch.equal(soup_of(result).W[1], torch.ones(len(soup_of(result).layout), dtype=torch.float64))
    assert result.models_used == 1
    assert result.held_out is not None
    assert result.held_out.mean == decision["held_out"]["best"]
    assert "the guard returned best" in result.notes[0]
    assert "instead of the learned soup" in str(result)
    assert [e.data["winner"] for e in events if e.kind == "guard"] == ["best"]
    without = cook(pool, task, "crossfit", guard=False, **{**BRIEF, "lr": 1e-6})
    assert soup_of(without).W.max() < 0.5


def test_the_guards_own_soups_are_chosen_without_the_samples_they_are_scored_on(tmp_path: Path) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 8, seed=3)), Task(mlp(), samples())
    decision = guard(cook(pool, task, "crossfit", **BRIEF))
    own = Kitchen(pool, task).individual_values()
    best = torch.empty(len(task.fit), dtype=torch.float64)
    for inside, outside in task.fit.folds(3, 0):
        best[outside] = own[own[:, inside].mean(dim=1).argmax(), outside]
    assert decision["held_out"]["best"] == float(best.mean())
    assert best.mean() != own.mean(dim=1).max()  # choosing on all samples would have looked different
    Soup.uniform(pool).load_into(task.model)
    assert decision["held_out"]["uniform"] == task.score().mean
    for name in ("best", "uniform", "greedy"):
        mean, low, high = decision["over_learned"][name]
        assert mean == pytest.approx(decision["held_out"][name] - decision["held_out"]["learned"])
        assert low < mean < high


def test_a_greedy_soup_that_wins_on_its_own_samples_is_asked_again_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First it is scored where it was chosen; where it wins there, folds choose it without the samples."""
    good = fine_tunes(mlp, 1, steps=300, spread=0.0)[0]
    noise = torch.Generator().manual_seed(0)
    bad = [{n: v + 3 * torch.randn(v.shape, generator=noise) for n, v in good.items()} for _ in range(3)]
    pool, task = write(tmp_path, [bad[0], good, *bad[1:]]), Task(mlp(), samples(60))
    monkeypatch.setattr(guarding, "simple", lambda *_: {})  # `best` is the same model, and would do
    events: list[Event] = []
    result = cook(pool, task, "crossfit", listen=events.append, **{**BRIEF, "lr": 1e-6})
    decision = guard(result)
    assert (decision["winner"], decision["flattered"]) == ("greedy", [])
    assert decision["held_out"]["greedy"] > decision["held_out"]["learned"]
    assert torch.equal(soup_of(result).W[1], torch.ones(len(soup_of(result).layout), dtype=torch.float64))
    assert len([event for event in events if event.kind == "greedy"]) == (1 + 3) * 3
    # Chosen on noise, it may win where it was chosen and nowhere else: then the learned soup stays.
    monkeypatch.setattr(guarding, "cross_fitted_greedy", lambda *_: torch.zeros(60, dtype=torch.float64))
    kept = cook(pool, task, "crossfit", **{**BRIEF, "lr": 1e-6})
    assert guard(kept)["winner"] == "learned"
    assert guard(kept)["held_out"]["greedy"] == 0.0
    assert kept.models_used == 4


def test_a_greedy_soup_that_does_not_win_even_there_is_not_asked_again(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    events: list[Event] = []
    result = cook(pool, task, "crossfit", listen=events.append, **BRIEF)
    assert guard(result)["winner"] == "learned"
    assert guard(result)["flattered"] == ["greedy"]
    assert len([event for event in events if event.kind == "greedy"]) == 4
    greedy = cook(pool, task, "greedy")
    soup_of(greedy).load_into(task.model)
    assert guard(result)["held_out"]["greedy"] == task.score().mean


@pytest.mark.parametrize(("more", "winner"), [(0, "learned"), (16, "learned"), (21, "learned"), (26, "best")])
def test_the_guard_steps_in_beyond_chance_only(more: int, winner: str) -> None:
    """Of 1,000 samples, 30 are right by the learned soup alone and 30 + `more` by the best ingredient alone.

    21 more would do for one comparison (p = 0.026); there are three.
    """
    learned, best = torch.ones(1000), torch.ones(1000)
    best[:30] = 0
    learned[30 : 60 + more] = 0
    worse = torch.zeros(1000)
    known = {"learned": learned, "best": best, "uniform": worse, "greedy": learned.clone()}
    decision = judged({name: Scores(values.double()) for name, values in known.items()})
    assert decision["winner"] == winner
    assert decision["over_learned"]["best"][0] == pytest.approx(more / 1000)


def test_of_several_that_are_better_the_guard_takes_the_best() -> None:
    right = {"learned": 500, "best": 700, "uniform": 900, "greedy": 800}
    known = {name: Scores((torch.arange(1000) < count).double()) for name, count in right.items()}
    assert judged(known)["winner"] == "uniform"


def test_equal_scores_keep_the_learned_soup(tmp_path: Path) -> None:
    """Where every sample is right whatever is done, there is no reason to fall back."""
    pool, task = write(tmp_path, fine_tunes(mlp, 3, steps=0)), Task(mlp(), samples(24))
    task = Task(mlp(), samples(24), metric=lambda outputs, batch: torch.ones(len(batch[1])))
    assert guard(cook(pool, task, "crossfit", **BRIEF))["winner"] == "learned"


def noisy(folder: Path, models: int = 12, count: int = 60, seed: int = 1) -> tuple[Pool, Task]:
    """Labels that nothing can know: whatever is chosen on them owes its score to luck."""
    x, _ = samples(count)
    y = torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(seed))
    return write(folder, fine_tunes(mlp, models, steps=3)), Task(mlp(), (x, y))


def test_what_a_start_owes_to_luck_is_taken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether it could matter hangs on the models, which come out differently on another processor.
    monkeypatch.setattr(guarding, "could_change", lambda *_: True)
    pool, task = noisy(tmp_path, count=30)
    settings = {**BRIEF, "start": "greedy", "lr": 1e-9}  # what was learned is where it began
    events: list[Event] = []
    result = cook(pool, task, "crossfit", listen=events.append, **settings)
    decision = guard(result)
    assert result.held_out is not None
    greedy = cook(pool, task, "greedy")
    soup_of(greedy).load_into(task.model)
    lucky = task.score().mean
    assert result.held_out.mean == lucky
    assert decision["flattered"] == []
    assert decision["held_out"]["learned"] == pytest.approx(lucky - decision["flattery"])
    # Chosen without the samples it is scored on, greedy is worth as much: the same soup, by the same standard.
    assert decision["held_out"]["greedy"] == pytest.approx(decision["held_out"]["learned"])
    assert decision["over_learned"]["greedy"][0] == pytest.approx(0)
    assert len([event for event in events if event.kind == "greedy"]) == (1 + 3) * 11
    kitchen = Kitchen(pool, task)
    chosen = settings_for("crossfit", **settings)
    with kitchen.live(kitchen.layout("tensor")) as live:
        elsewhere = guarding.cross_fitted_greedy(kitchen, live, chosen, task.fit.folds(3, 0))
    assert decision["held_out"]["greedy"] == float(elsewhere.mean())


def test_what_is_chosen_on_noise_is_flattered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "could_change", lambda *_: True)
    settings = {**BRIEF, "start": "greedy", "lr": 1e-9}
    found = []
    for seed in range(6):  # one draw of the labels could be unlucky
        pool, task = noisy(tmp_path / str(seed), count=30, seed=seed)
        found.append(guard(cook(pool, task, "crossfit", **settings))["flattery"])
    assert sum(found) / len(found) > 0.04


def test_luck_no_longer_hides_that_something_simpler_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As good as uniform where it was chosen, and much worse elsewhere: uniform is returned."""
    pool, task = noisy(tmp_path)
    settings = {**BRIEF, "start": "greedy", "lr": 1e-9}
    lucky = cook(pool, task, "crossfit", **settings).held_out
    assert lucky is not None
    other = lucky.values.roll(1)  # as good, on other samples
    few = {"best": Scores(torch.zeros(60, dtype=torch.float64)), "uniform": Scores(other)}
    monkeypatch.setattr(guarding, "simple", lambda *_: few)
    monkeypatch.setattr(guarding, "cross_fitted_greedy", lambda *_: torch.zeros(60, dtype=torch.float64))
    result = cook(pool, task, "crossfit", **settings)
    assert guard(result)["winner"] == "uniform"
    assert guard(result)["held_out"]["learned"] == 0.0
    assert "instead of the learned soup, 0.00 %" in result.notes[0]
    assert torch.equal(soup_of(result).W, torch.full_like(soup_of(result).W, 1 / 12))


def test_where_it_could_change_nothing_no_fold_is_searched(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    events: list[Event] = []
    settings = {**BRIEF, "start": "greedy", "steps": 60}
    result = cook(pool, task, "crossfit", listen=events.append, **settings)
    decision = guard(result)
    assert (decision["winner"], decision["flattery"]) == ("learned", None)
    assert decision["flattered"] == ["learned", "greedy"]
    assert result.held_out is not None
    assert decision["held_out"]["learned"] == result.held_out.mean
    assert len([event for event in events if event.kind == "greedy"]) == 4


def decided(pool: Pool, task: Task, start: str, learned: Scores) -> guarding.Decision:
    """Of folds that set out this way and were scored like this, where greedy is the mean of the first two."""
    kitchen, settings = Kitchen(pool, task), settings_for("crossfit", **{**BRIEF, "start": start})
    with kitchen.live(kitchen.layout("tensor")) as live:
        return guarding.decide(kitchen, live, settings, learned, (0, 1), task.fit.folds(3, 0))


def test_a_start_that_learning_made_worse_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both owe the same to the samples; so if the greedy soup is clearly better on them, it is better."""
    pool, task = zoo(tmp_path, 5)
    nothing = Scores(torch.zeros(len(task.fit), dtype=torch.float64))
    monkeypatch.setattr(guarding, "simple", lambda *_: {"best": nothing, "uniform": nothing})
    decision = decided(pool, task, "greedy", nothing)
    assert (decision.winner, decision.flattered) == ("greedy", ("learned", "greedy"))


def test_what_folds_owe_to_a_greedy_start_is_taken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = zoo(tmp_path, 5)
    half = Scores(torch.full((len(task.fit),), 0.5, dtype=torch.float64))
    monkeypatch.setattr(guarding, "simple", lambda *_: {"best": half, "uniform": half})
    monkeypatch.setattr(guarding, "could_change", lambda *_: True)
    nowhere = torch.zeros(len(task.fit), dtype=torch.float64)
    monkeypatch.setattr(guarding, "cross_fitted_greedy", lambda *_: nowhere)
    decision = decided(pool, task, "greedy", half)
    kitchen = Kitchen(pool, task)
    with kitchen.live(kitchen.layout("tensor")) as live:
        live.theta.copy_(live.mean([0, 1]))
        greedy = kitchen.score_live(live, weights.chosen(5, len(live.layout), (0, 1))).values
    assert greedy.sum() > 0
    assert torch.equal(decision.known["learned"].values, half.values - greedy)
    assert decision.flattery == pytest.approx(float(greedy.mean()))
    assert torch.equal(decision.known["greedy"].values, nowhere)


def test_a_greedy_soup_that_wins_where_it_was_chosen_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folds from the mean owe nothing to the samples that the greedy soup was chosen on."""
    pool, task = zoo(tmp_path, 5)
    nothing = Scores(torch.zeros(len(task.fit), dtype=torch.float64))
    monkeypatch.setattr(guarding, "simple", lambda *_: {"best": nothing, "uniform": nothing})
    monkeypatch.setattr(guarding, "could_change", lambda *_: False)
    monkeypatch.setattr(guarding, "cross_fitted_greedy", lambda *_: nothing.values.clone())
    decision = decided(pool, task, "mean", nothing)
    assert decision.flattered == ()
    assert decision.known["greedy"].mean == 0


@pytest.mark.parametrize(("ahead", "models", "expected"), [(0, 72, True), (0, 2, False), (20, 72, False)])
def test_whether_luck_could_matter_depends_on_the_lead_and_on_how_many_were_tried(
    ahead: int, models: int, expected: bool
) -> None:
    """Of 1,000 samples, 30 are right by the best ingredient alone and 30 + `ahead` by the learned soup alone."""
    learned, best = torch.ones(1000), torch.ones(1000)
    learned[:30] = 0
    best[30 : 60 + ahead] = 0
    known = {"learned": learned, "best": best, "uniform": torch.zeros(1000), "greedy": learned.clone()}
    found = {name: Scores(values.double()) for name, values in known.items()}
    assert could_change(found, models) is expected
    swapped = {**found, "best": found["uniform"], "uniform": found["best"]}
    assert could_change(swapped, models) is expected


@pytest.mark.parametrize("per_batch", [False, True])
def test_what_is_to_be_said_of_the_data_is_said_whatever_the_guard_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_batch: bool
) -> None:
    x, y = samples(40)
    y = y.clamp(max=1)
    y[0] = 2
    metric: Any = (
        (lambda outputs, batch: float((outputs.argmax(1) == batch[1]).float().mean()))
        if per_batch
        else "accuracy"
    )
    task = Task(mlp(), (x, y), metric=metric, batch_size=8)
    known = {
        name: Scores(torch.full((40,), float(name == "uniform"), dtype=torch.float64))
        for name in ("learned", "uniform")
    }
    monkeypatch.setattr(guarding, "decide_by_own", lambda *_: guarding.Decision(known))
    result = cook(write(tmp_path, fine_tunes(mlp, 3)), task, "crossfit", **{**BRIEF, "start": "own-greedy"})
    assert result.notes[0].startswith("no guard" if per_batch else "the guard returned uniform")
    assert any(note.startswith("class 2 has fewer than") for note in result.notes)


def test_without_a_score_per_sample_there_is_no_guard(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 3))

    def mean(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> float:
        return float((outputs.argmax(1) == batch[1]).float().mean())

    task = Task(mlp(), samples(40), metric=mean, batch_size=8)
    result = cook(pool, task, "crossfit", **BRIEF)
    assert not [entry for entry in result.history if entry["kind"] == "guard"]
    assert "one score per batch" in result.notes[0]
    assert result.held_out is not None
