"""A method is a function and its entry in the registry: everything else finds it there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from stockpot import Soup, compare, cook
from stockpot.layout import Layout
from stockpot.run.rebuild import rebuild_soup
from stockpot.soups.problem import Decision, Problem, StateStore
from stockpot.soups.registry import METHODS, Method
from stockpot.soups.settings import Settings
from zoo import samples, zoo

NAME = "by-gradient"


def by_gradient(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:
    """It learns nothing, and has weights for each tensor: the share of each ingredient in the squared gradient."""
    task, layout = problem.task, problem.layout(settings.granularity)
    found = torch.zeros(len(problem.pool), len(layout), dtype=torch.float64)
    batch = task.to_device(task.fit.batch(torch.arange(len(task.fit))))
    with problem.live(layout) as live, task.learning():
        for k in range(len(found)):
            live.load_ingredient(k)
            torch.autograd.backward(task.loss(batch).mean)
            squares = live.collect_gradient().double().square()
            found[k] = torch.stack([squares[start:stop].sum() for start, stop in live.plan.bounds])
    return Decision(found / found.sum(dim=0), layout)


@pytest.fixture(autouse=True)
def _entry(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("stockpot.soups.mine")
    module.by_gradient = by_gradient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = Method(NAME, "weights by gradients", "mine:by_gradient", {"granularity": "tensor"})
    monkeypatch.setitem(METHODS, NAME, entry)


def test_a_method_that_does_not_learn_may_have_weights_for_each_tensor(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 3, report=samples(20, seed=5))
    first, again = cook(pool, task, NAME), cook(pool, task, NAME)  # the same question, after the report data was seen
    assert first.soup is not None
    assert again.soup is not None
    assert torch.equal(first.soup.W, again.soup.W)
    assert first.soup.W.shape == (3, len(Layout.of(pool, "tensor")))
    pool, task = zoo(tmp_path, 3)
    coarse = compare(pool, task, [NAME], granularity="module")[NAME].soup
    assert coarse is not None
    assert coarse.W.shape == (3, 2)


def test_records_reports_and_rebuilding_know_it(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool", 3, report=samples(20, seed=5))
    run = tmp_path / "run"
    found = compare(pool, task, ["uniform", NAME], run=run)
    assert compare(pool, task, ["uniform", NAME], run=run).reused == ("uniform", NAME)
    assert NAME in found.report().read_text()
    path, _ = rebuild_soup(run, method=NAME, out=tmp_path / "soup")
    soup = found[NAME].soup
    assert soup is not None
    assert torch.equal(Soup.load(path).W, soup.W)
