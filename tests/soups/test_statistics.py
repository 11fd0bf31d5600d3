"""BatchNorm statistics of a soup: measured again, averaged or copied; recorded and rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stockpot import Soup, Task, cook
from stockpot.events import Listener, ignore
from stockpot.soup import rebuild, weights
from stockpot.soups import crossfit
from stockpot.soups.problem import Problem
from zoo import fine_tunes, normed, same, samples, write, zoo

BRIEF: dict[str, Any] = {"steps": 4, "batch_size": 16, "block_size": 2}


@pytest.mark.parametrize("choice", ["recalibrate", "average", "copy"])
@pytest.mark.parametrize("method", ["uniform", "mehl+"])
def test_statistics_are_recorded_and_rebuilt(tmp_path: Path, method: str, choice: str) -> None:
    pool, task = zoo(tmp_path / "pool", 4, build=normed, statistics=choice)
    result = cook(pool, task, method, donor=2, **BRIEF)
    soup = result.soup
    assert soup is not None
    state = soup.state_dict()
    assert same(task.model.state_dict(), state)  # what was scored is what is saved
    own = torch.stack([pool.tensor(k, "1.running_mean") for k in range(4)])  # (K, 8)
    found = state["1.running_mean"]
    if choice == "average":
        weights = soup.W.mean(dim=1).clamp_min(0)
        assert torch.allclose(found, (weights @ own.double() / weights.sum()).float(), atol=1e-6)
    elif choice == "copy":
        assert torch.equal(found, own[2])  # the donor's
    else:
        x, _ = task.fit.batch(torch.arange(len(task.fit)))
        with torch.no_grad():
            hidden = x @ state["0.weight"].T + state["0.bias"]
        assert torch.allclose(found, hidden.mean(dim=0), atol=1e-5)
        assert torch.allclose(state["1.running_var"], hidden.var(dim=0), rtol=1e-4)
    saved = soup.save(tmp_path / "soup")
    assert (saved / "statistics.safetensors").exists() == (choice == "recalibrate")
    assert same(load_file(saved / "model.safetensors"), state)
    again = rebuild(saved, tmp_path / "again")
    assert sorted(p.name for p in again.iterdir()) == sorted(p.name for p in saved.iterdir())
    assert all((again / p.name).read_bytes() == p.read_bytes() for p in saved.iterdir())
    assert same(Soup.load(saved).state_dict(), state)


@pytest.mark.parametrize("choice", ["recalibrate", "average", "copy"])
def test_a_soup_of_one_keeps_that_ones_statistics(tmp_path: Path, choice: str) -> None:
    pool, task = zoo(tmp_path, 3, build=normed, statistics=choice)
    soup = cook(pool, task, "best").soup
    assert soup is not None
    k = int(soup.W[:, 0].argmax())
    assert same(soup.state_dict(), {name: pool.tensor(k, name) for name in soup.state_dict()})


def test_learning_uses_batch_statistics_and_no_dropout_and_leaves_modes_alone(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4, build=normed)
    task.model.train()
    first = cook(pool, task, "hl", steps=1, batch_size=16).history[0]["loss"]
    assert task.model.training
    Soup.uniform(pool).load_into(task.model)
    batch = task.fit.batch(task.fit.order(0, 0, 16))
    model = task.model.eval()
    model[1].train()  # type: ignore[index]
    with torch.no_grad():
        assert float(torch.nn.functional.cross_entropy(model(batch[0]), batch[1])) == pytest.approx(first, rel=1e-5)


def test_a_pool_without_counters_is_cooked_all_the_same(tmp_path: Path) -> None:

    states = fine_tunes(normed, 3)
    for state in states:
        del state["1.num_batches_tracked"]
    result = cook(write(tmp_path, states), Task(normed(), samples()), "mehl+", **BRIEF)
    assert result.soup is not None
    assert "1.num_batches_tracked" not in result.soup.state_dict()


def test_only_means_to_set_out_from_have_statistics_of_a_part_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = zoo(tmp_path, 4, build=normed)
    limits: list[int | None] = []
    recalibrate = Task.recalibrate

    def watched(self: Task, listen: Listener = ignore, limit: int | None = None) -> dict[str, torch.Tensor]:
        limits.append(limit)
        return recalibrate(self, listen, limit)

    monkeypatch.setattr(Task, "recalibrate", watched)
    monkeypatch.setattr(crossfit, "CALIBRATION", 20)
    cook(pool, task, "greedy")
    assert limits == [None] * len(limits)
    limits.clear()
    cook(pool, task, "crossfit", folds=2, steps=4, batch_size=16)
    starts = [limit for limit in limits if limit is not None]
    assert starts == [20] * len(starts) == limits[: len(starts)]
    assert len(starts) >= 4  # two folds: of all models, and of half of them
    assert len(limits) > len(starts)


@pytest.mark.parametrize("choice", ["recalibrate", "average", "copy"])
def test_what_is_scored_while_choosing_is_what_the_file_will_hold(tmp_path: Path, choice: str) -> None:
    """One rule for the live model and for the soup."""
    pool, task = zoo(tmp_path, 4, build=normed, statistics=choice, metric="loss")
    result = cook(pool, task, "uniform", donor=1)
    assert result.fit is not None
    problem = Problem(pool, task, donor=1)
    with problem.live(problem.layout("model")) as live:
        live.theta.copy_(live.mean())
        scores = problem.score_live(live, weights.uniform(4, 1))
    assert scores.value == pytest.approx(result.fit.value, rel=1e-5)
