"""Samples of one group stay in one fold and are one unit of intervals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stockpot import Pool, cook
from stockpot.errors import DataError
from stockpot.soups.result import Result
from stockpot.task import METRICS, Data, Metric, Scores, Task
from stockpot.task.data import fingerprint

from .models import blobs, linear

OWN = Metric("own", lambda outputs, batch: outputs[0][:, :1], is_mean=True)


@pytest.mark.parametrize("seed", range(5))
def test_folds_never_divide_a_group(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 23, (300,), generator=generator)
    data = Data.of((torch.randn(300, 4), torch.arange(300) % 3), groups=groups)
    held = [outside for _, outside in data.folds(4, seed)]
    assert torch.cat(held).sort().values.tolist() == list(range(300))
    of_fold = [set(groups[rows].tolist()) for rows in held]
    assert sum(map(len, of_fold)) == len(set(groups.tolist()))
    assert all(50 <= len(rows) <= 100 for rows in held)
    assert all(torch.bincount(rows % 3).min() >= 10 for rows in held)
    assert data.subset(held[0]).groups is not None


def test_groups_are_refused_that_cannot_be_units() -> None:
    x, y = blobs(12)
    for groups, message in (
        (torch.zeros(12), "one whole number or name for each of 12 samples"),
        (torch.arange(5), "one whole number or name for each of 12 samples"),
        (["a"] * 12, "found one group of 12 samples"),
    ):
        with pytest.raises(DataError, match=message):
            Data.of((x, y), groups=groups)
    with pytest.raises(DataError, match="at least 5 groups for 5 folds, found 3"):
        Data.of((x, y), groups=list("abcabcabcabc")).folds(5, 0)
    assert fingerprint(Data.of((x, y))) != fingerprint(Data.of((x, y), groups=[*range(6)] * 2))


def test_intervals_count_units() -> None:
    """Every sample ten times over is no more evidence than once."""
    table = torch.randn(30, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    units = torch.arange(30).repeat_interleave(10)
    for metric, once in ((OWN, table), (METRICS["r2"], torch.cat([table, table.flip(0)], dim=1))):
        single, many = Scores(once, metric), Scores(once[units], metric, units=units)
        assert many.interval() == pytest.approx(single.interval(), abs=1e-9)
        naive = Scores(once[units], metric).interval()
        assert naive[1] - naive[0] < 0.5 * (single.interval()[1] - single.interval()[0])
        other = Scores(once.flip(0), metric)
        both = Scores(once.flip(0)[units], metric, units=units)
        assert many.difference(both) == pytest.approx(single.difference(other), abs=1e-9)
    assert Scores(table, OWN, units=torch.zeros(30).long()).interval() == (-math.inf, math.inf)


def test_a_task_hands_groups_to_its_scores() -> None:
    x, y = blobs(60)
    groups = torch.arange(60) // 6
    task = Task(linear(), (x, y), groups=groups)
    scores = task.score()
    assert scores.units is not None
    assert scores.units.tolist() == groups.tolist()
    assert scores.independent == 10
    assert scores.rows(torch.tensor([0, 59])).units.tolist() == [0, 9]  # type: ignore[union-attr]
    assert task.score(indices=torch.tensor([59, 0])).units.tolist() == [9, 0]  # type: ignore[union-attr]


def test_a_run_that_goes_on_still_counts_groups(tmp_path: Path) -> None:
    for k in range(3):
        torch.save(linear(seed=k).state_dict(), tmp_path / f"{k}.pt")
    x, y = blobs(60)
    groups = torch.arange(60) // 6

    def cooked() -> Result:
        task = Task(linear(), (x, y), blobs(60, seed=1), groups=groups, report_groups=groups)
        return cook(Pool.open(tmp_path / "*.pt"), task, "crossfit", run=tmp_path / "run", steps=2, folds=3)

    first, again = cooked(), cooked()
    for one, two in ((first.held_out, again.held_out), (first.report, again.report)):
        assert one is not None
        assert two is not None
        assert one.independent == 10
        assert two.interval() == one.interval()
