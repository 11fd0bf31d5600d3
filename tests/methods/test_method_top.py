"""The mean of the best few: how many they are, by the loss of their mean on the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot import Soup, Task
from stockpot.methods import starts
from stockpot.methods.kitchen import Kitchen
from stockpot.soup import weights
from stockpot.task import Scores
from zoo import fine_tunes, layout_of, mlp, samples, uneven, write


class Known(Kitchen):
    """Ingredients whose scores are given. (K, N)"""

    def __init__(self, pool: Any, task: Task, values: Tensor) -> None:
        super().__init__(pool, task)
        self.remember([Scores(row.double()) for row in values], 0.0)


def losses(pool: Any, task: Task, ranking: list[int], part: Tensor | None) -> dict[int, float]:
    """Of the mean of the first n, for n = 1, 2, ..., K, as a user would find them."""
    layout = layout_of(pool)
    found = {}
    for n in range(1, len(ranking) + 1):
        W = weights.chosen(len(ranking), len(layout), ranking[:n])
        Soup(pool, layout, W).load_into(task.model)
        found[n] = task.score(indices=part).loss
    return found


def top_of(pool: Any, task: Task, values: Tensor, part: Tensor | None = None) -> tuple[int, ...] | None:
    kitchen = Known(pool, task, values)
    with kitchen.live(kitchen.layout("tensor")) as live:
        return starts.top(kitchen, live, part, "soups of the best")


def scored(ranking: list[int], n: int) -> Tensor:
    """Scores of so many ingredients, the first of the ranking having the highest. (K, n)"""
    values = torch.zeros(len(ranking), n)
    for place, k in enumerate(ranking):
        values[k, place:] = 1
    return values


@pytest.mark.parametrize("ranking", [[0, 1, 2, 3, 4, 5], [3, 5, 1, 0, 2, 4], [4, 2, 0, 5, 1, 3]])
@pytest.mark.parametrize("part", [None, torch.arange(20, 40)])
def test_the_top_are_as_many_of_the_best_as_have_the_lowest_loss(
    tmp_path: Path, ranking: list[int], part: Tensor | None
) -> None:
    pool, task = uneven(tmp_path)
    values = scored(ranking, len(task.fit))
    if part is not None:  # elsewhere the others are ahead
        values = torch.cat((scored(ranking[::-1], 20), scored(ranking, len(task.fit) - 20)), dim=1)
    found = top_of(pool, task, values, part)
    by_size = losses(pool, task, ranking, part)
    n = min([1, 2, 3, 4, 6], key=lambda size: by_size[size])
    assert set(range(6) if found is None else found) == set(ranking[:n])
    if found is not None:
        assert list(found) == sorted(found, key=lambda k: pool.digests()[k])  # summed up alike in any pool


class Losing(Known):
    """Soups whose losses are given, in the order in which they are asked for."""

    def __init__(self, pool: Any, task: Task, values: Tensor, losses: list[float]) -> None:
        super().__init__(pool, task, values)
        self.losses, self.asked = losses, 0

    def score_live(self, live: Any, W: Tensor, **options: Any) -> Scores:
        self.asked += 1
        return Scores(torch.ones(4, dtype=torch.float64), self.losses[self.asked - 1])


@pytest.mark.parametrize(
    ("given", "wanted", "asked"),
    [
        # Three sizes in a row that are no better: larger ones are not tried.
        ([3, 2, 1, 4, 5, 6, 0, 0, 0], 3, 6),
        ([3, 4, 4, 2, 4, 4, 1, 9, 9], 12, 9),
        ([1, 1, 1, 1, 0, 0, 0, 0, 0], 1, 4),
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], None, 9),
        ([float("nan"), 2, 3, 4, 5, 0, 0, 0, 0], 2, 5),
    ],
)
def test_how_many_are_tried(tmp_path: Path, given: list[float], wanted: int | None, asked: int) -> None:
    """1, 2, 3, 4, 6, 8, 12, 16 and all 18."""
    pool, task = write(tmp_path, fine_tunes(mlp, 18, steps=1)), Task(mlp(), samples())
    kitchen = Losing(pool, task, scored(list(range(18)), len(task.fit)), given)
    with kitchen.live(kitchen.layout("tensor")) as live:
        found = starts.top(kitchen, live, None, "soups of the best")
    assert found is None if wanted is None else found is not None and set(found) == set(range(wanted))
    assert kitchen.asked == asked


def test_the_soups_are_those_that_are_judged(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    seen = []

    class Watching(Known):
        def score_live(self, live: Any, W: Tensor, **options: Any) -> Scores:
            seen.append((live.theta.clone(), W))
            return super().score_live(live, W, **options)

    kitchen = Watching(pool, task, scored([2, 0, 1, 5, 4, 3], len(task.fit)))
    with kitchen.live(kitchen.layout("tensor")) as live:
        starts.top(kitchen, live, None, "soups of the best")
        for n, (theta, W) in zip((1, 2, 3, 4, 6), seen, strict=False):
            members = [2, 0, 1, 5, 4, 3][:n]
            assert torch.equal(W, weights.chosen(6, len(live.layout), members))
            assert (theta - live.mean(members)).abs().max() <= 1e-6
    assert len(seen) >= 4


def test_of_equal_ones_the_top_are_the_same_wherever_they_stand(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    values = torch.ones(6, len(task.fit))
    chosen = set()
    for first in range(6):
        turned = pool.subset([(first + k) % 6 for k in range(6)])
        found = top_of(turned, task, values)
        chosen.add(None if found is None else tuple(turned.digests()[k] for k in found))
    assert len(chosen) == 1


def test_scores_of_whole_batches_belong_to_no_part(tmp_path: Path) -> None:
    """The ranking is that of all samples then, also where one batch says otherwise; the loss is that of the part."""
    pool, task = uneven(tmp_path, 3)
    part = torch.arange(5)
    for ranking in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        values = torch.ones(3, len(task.fit))
        for place, k in enumerate(ranking):
            values[k, : 2 - place] = 0  # the first batch says the opposite
            values[k, 5 : 5 + 6 * place] = 0
        kitchen = Known(pool, task, values)
        kitchen.remember(
            [Scores(one.values, batches=(5, len(task.fit) - 5)) for one in kitchen.individual()], 0.0
        )
        with kitchen.live(kitchen.layout("tensor")) as live:
            found = starts.top(kitchen, live, part, "soups of the best")
        by_size = losses(pool, task, ranking, part)
        n = min(by_size, key=lambda size: by_size[size])
        assert set(range(3) if found is None else found) == set(ranking[:n])
