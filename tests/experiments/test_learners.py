"""The learners of the search: their gradient, their coordinates, and that every idea of the record can be run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import search
import torch
from learners import rounds
from learners.coordinates import Eigenbasis, Grouped, Plain
from learners.problem import Problem
from learners.solve import Shared, Way, _factor, _schedule, solve
from study_zoo import make
from torch import Tensor, nn

from stockpot.engine.descent import learning_rates
from stockpot.recipe import load_recipe
from stockpot.recipe.build import build_train_data
from stockpot.soups.settings import settings_for
from stockpot.task import Data
from zoo import samples, zoo

ROWS = torch.arange(32)
OUTSIDE = torch.arange(32, 48)


@pytest.fixture
def problem(tmp_path: Path) -> Iterator[Problem]:
    pool, task = zoo(tmp_path, 5)
    with Problem(pool, task, Data.of(samples(30, seed=7), name="dev")) as made:
        yield made


def some(problem: Problem, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(problem.K, problem.G, generator=torch.Generator().manual_seed(seed))


def test_the_gradient_is_that_of_the_loss(problem: Problem) -> None:
    a, along = some(problem), some(problem, 1)
    _, slope = problem.gradient(a, ROWS)
    step = 1e-2
    change = problem.loss_on(a + step * along, ROWS) - problem.loss_on(a - step * along, ROWS)
    assert float((slope * along).sum()) == pytest.approx(change / (2 * step), rel=1e-2)


def test_smoother_labels_are_those_of_the_task(problem: Problem) -> None:
    a = some(problem)
    plain = problem.loss_on(a, ROWS)
    solve(problem, Way(1, 0.0, smoothing=0.3), ROWS, OUTSIDE, 0)
    smoothed = problem.loss_on(a, ROWS)
    batch = problem.task.fit.batch(ROWS)
    assert smoothed == pytest.approx(float(problem.task.loss(batch, label_smoothing=0.3).detach()), rel=1e-4)
    assert abs(smoothed - plain) > 1e-3
    solve(problem, Way(1, 0.0), ROWS, OUTSIDE, 0)
    assert problem.loss_on(a, ROWS) == plain


@pytest.mark.parametrize("teacher", ["ensemble", "greedy"])
def test_a_share_of_the_label_may_be_what_the_pool_says(problem: Problem, teacher: str) -> None:
    a = some(problem)
    plain = problem.loss_on(a, ROWS)
    solve(problem, Way(1, 0.0, teacher=teacher, share=0.4), ROWS, OUTSIDE, 0)
    found = problem.loss_on(a, ROWS)
    logits = problem.task.logits(problem.task.fit.batch(ROWS)).detach()  # of the soup that is live now
    said = (problem.taught(teacher)[ROWS] * logits.log_softmax(1)).sum(dim=1).mean()
    assert found == pytest.approx(0.6 * plain - 0.4 * float(said), rel=1e-4)
    assert torch.allclose(problem.taught(teacher).sum(dim=1), torch.ones(len(problem.task.fit)))
    solve(problem, Way(1, 0.0), ROWS, OUTSIDE, 0)
    assert problem.loss_on(a, ROWS) == plain


def test_augmented_samples_differ_from_step_to_step_and_are_not_judged_on(problem: Problem) -> None:
    a = some(problem)
    plain = float(problem.gradient(a, ROWS)[0])
    solve(problem, Way(1, 0.0, augmentation=0.5), ROWS, OUTSIDE, 0)
    first, second = (float(problem.gradient(a, ROWS)[0]) for _ in range(2))
    assert len({plain, first, second}) == 3
    assert problem.loss_on(a, ROWS) == pytest.approx(plain, rel=1e-5)


def test_folds_may_begin_at_the_greedy_soup_of_all_samples(problem: Problem) -> None:
    everything = torch.arange(len(problem.task.fit))
    found = solve(problem, Way(1, 0.0, greedy=True, whole=True), ROWS, OUTSIDE, 0)
    assert torch.equal(found.start, problem.greedy_start(everything))
    own = solve(problem, Way(1, 0.0, greedy=True), ROWS, OUTSIDE, 0)
    assert torch.equal(own.start, problem.greedy_start(ROWS))


def test_one_number_added_to_a_column_changes_nothing(problem: Problem) -> None:
    a = some(problem)
    assert problem.loss_on(a + 0.7, ROWS) == pytest.approx(problem.loss_on(a, ROWS), rel=1e-5)
    assert problem.gradient(a, ROWS)[1].sum(dim=0).abs().max() < 1e-5


def coordinates(problem: Problem) -> list[Plain]:
    return [Plain(), Grouped([0, 0, 1, 1], problem.device), Eigenbasis(problem.gram)]


def test_coordinates_pull_a_gradient_back_as_they_map_forward(problem: Problem) -> None:
    for one in coordinates(problem):
        z = torch.randn_like(one.start(some(problem)))
        slope = some(problem, 3)
        assert (one.to_a(z) * slope).sum() == pytest.approx(float((z * one.pull(slope)).sum()), rel=1e-3)
        again = one.to_a(one.start(one.to_a(z)))
        assert torch.allclose(again, one.to_a(z), atol=1e-3)


def test_directions_are_orthogonal_in_the_eigenbasis(problem: Problem) -> None:
    one = Eigenbasis(problem.gram)
    for j in range(problem.G):
        basis = one._map[j].double()
        lengths = basis.T @ problem.gram[j].double() @ basis
        lengths = lengths / lengths.diagonal().max()
        assert torch.allclose(lengths, lengths.diagonal().round().diag(), atol=1e-3)


def test_what_is_kept_is_never_worse_on_the_rows_outside(problem: Problem) -> None:
    before = problem.loss_on(torch.zeros_like(problem.a), OUTSIDE)
    for way in (
        Way(20, 50.0, retreat=True),
        Way(20, 0.05),
        Way(20, 0.05, smooth=True, retreat=True, advance=1.5),
    ):
        found = solve(problem, way, ROWS, OUTSIDE, 0)
        assert found.held_out <= before
        assert problem.loss_on(found.a, OUTSIDE) == pytest.approx(found.held_out, rel=1e-5)


def test_the_factor_on_the_logits_is_the_best_one(problem: Problem) -> None:
    a = some(problem)
    found = _factor(problem, a, ROWS)
    best = problem.loss_on(a, ROWS, torch.tensor(found))
    for other in (0.9 * found, 1.1 * found):
        assert best < problem.loss_on(a, ROWS, torch.tensor(other))


def test_a_rate_that_is_far_too_high_arrives_by_retreating(problem: Problem) -> None:
    kept, retreated = (
        solve(problem, Way(40, 1e4, retreat=retreat), ROWS, OUTSIDE, 0).held_out for retreat in (False, True)
    )
    assert retreated < kept == problem.loss_on(torch.zeros_like(problem.a), OUTSIDE)


def test_what_is_remembered_on_the_way_back(problem: Problem) -> None:
    """After a step that was too long: AdamW anew, as it was at the best, or as it was at the end."""
    found = {
        kept: solve(problem, Way(40, 0.5, retreat=True, remember=kept, evaluations=20), ROWS, OUTSIDE, 0)
        for kept in ("", "best", "last")
    }
    assert len({round(one.held_out, 9) for one in found.values()}) == 3
    start = problem.loss_on(torch.zeros_like(problem.a), OUTSIDE)
    assert all(one.held_out < start for one in found.values())


def test_a_rate_that_is_too_small_to_matter_ends_it(problem: Problem) -> None:
    taken = []
    for slowest in (0.0, 0.5**3):
        before = problem.taken
        solve(problem, Way(40, 1e4, retreat=True, slowest=slowest, evaluations=40), ROWS, OUTSIDE, 0)
        taken.append(problem.taken - before)
    assert taken == [40, 3]


def test_a_rate_that_rises_first_rises_as_in_the_product() -> None:
    settings = settings_for("crossfit", warmup=0.1, lr=0.02)
    way = Way(30, 0.02, warmup=0.1)
    assert [0.02 * _schedule(way, j) for j in range(30)] == pytest.approx(learning_rates(settings, 30))


def test_a_smaller_first_pace_is_a_smaller_rate_until_something_is_judged(problem: Problem) -> None:
    slower, small = (
        solve(problem, Way(3, rate, pace=pace, constant=True, evaluations=1), ROWS, OUTSIDE, 0).a
        for rate, pace in ((0.2, 0.25), (0.05, 1.0))
    )
    assert slower.any()
    assert torch.allclose(slower, small, atol=1e-6)


def test_one_second_moment_for_all() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimiser = Shared([{"params": [weight], "weight_decay": 0.1}], lr=0.5)
    weight.grad = torch.tensor([3.0, -4.0])
    optimiser.step()
    size = (25 / 2) ** 0.5  # the root mean square of the gradient
    assert torch.allclose(weight, torch.tensor([0.95 - 0.5 * 3 / size, -1.9 + 0.5 * 4 / size]))


def test_every_idea_of_the_record_runs(problem: Problem) -> None:
    all_ideas = {name: idea for make in rounds.ROUNDS.values() for name, idea in make(problem).items()}
    assert len(all_ideas) > 40
    greedy = torch.zeros(30, dtype=torch.float64)
    for name, (way, folds) in all_ideas.items():
        short = dataclasses.replace(way, steps=4, batch=min(way.batch, 16))
        row, a, values = search.attempt(problem, short, min(folds, 4), 0, greedy)
        for share in search.SHARES:
            mean, _, gain, _ = row[f"{share:g} of the way"]
            assert gain == mean  # a greedy soup that is always wrong
        assert bool(a.isfinite().all()), name
        assert len(values) == 30, name
        assert row["gradient_steps"] > 0, name
        assert row["accuracy"] == pytest.approx(float(values.mean())), name


def test_unused_training_samples_are_those_that_fine_tuning_did_not_take(tmp_path: Path) -> None:
    file = make(tmp_path) / "tiny" / "recipe.yaml"
    stated = ["data.report=null", "data.train={of: dev, count: 20}"]
    taken, left = build_train_data(load_recipe(file, stated)), search.unused(file, stated, 40)
    rows = [tuple(row) for data in (taken, left) for row in data.columns[0].tolist()]
    assert len(rows) == len(set(rows)) == 60
    assert set(rows) == {tuple(row) for row in search.dev_data(file, stated[:1], "dev").columns[0].tolist()}
