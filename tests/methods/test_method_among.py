"""Learning among the best few: as if the pool had no other ingredients, and those of the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stockpot import Event, Pool, Task, cook
from stockpot.errors import MethodError
from stockpot.methods.blocks import blocks_for
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.settings import settings_for
from stockpot.soup import weights
from zoo import fine_tunes, mlp, samples, uneven, weights_of, write

BRIEF: dict[str, Any] = {"steps": 8, "batch_size": 16, "lr": 0.05}
FOLDED: dict[str, Any] = {**BRIEF, "folds": 3, "evaluations": 4}


def best_of(pool: Pool, task: Task, n: int) -> list[int]:
    own = Kitchen(pool, task).individual_values().mean(dim=1).tolist()
    digests = pool.digests()
    return sorted(range(len(pool)), key=lambda k: (-own[k], digests[k]))[:n]


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("hl+", BRIEF),
        ("mehl+", {**BRIEF, "block_size": 2, "passes": 2}),
        ("mehl", {**BRIEF, "block_size": 5}),  # more than are learned
        ("crossfit", {**FOLDED, "guard": False, "start": "mean", "reach": 0.5}),
        ("crossfit", {**FOLDED, "guard": False, "start": "top"}),
    ],
)
def test_it_is_learning_in_a_pool_of_these_alone(tmp_path: Path, method: str, given: dict[str, Any]) -> None:
    pool, task = uneven(tmp_path)
    few = sorted(best_of(pool, task, 3))
    found = weights_of(cook(pool, task, method, among=3, **given))
    alone = {**given, "block_size": min(3, given["block_size"])} if "block_size" in given else given
    wanted = weights_of(cook(pool.subset(few), task, method, **alone))
    assert (found[few] - wanted).abs().max() <= 1e-6
    assert (wanted - 1 / 3).abs().max() > 1e-3  # something was learned
    others = [k for k in range(6) if k not in few]
    assert torch.equal(found[others], torch.zeros(3, found.shape[1], dtype=torch.float64))
    assert (found.sum(dim=0) - 1).abs().max() <= 1e-12


def test_ingredients_of_the_start_are_learned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = uneven(tmp_path)
    worst = best_of(pool, task, 6)[-1]
    monkeypatch.setattr("stockpot.methods.starts.greedy_members", lambda *_: (worst,))
    events: list[Event] = []
    given = {**FOLDED, "guard": False, "start": "greedy", "among": 2, "lr": 0.0}
    found = weights_of(cook(pool, task, "crossfit", listen=events.append, **given))
    assert torch.equal(found, weights.chosen(6, found.shape[1], [worst]))
    (block,) = [event.data["models"] for event in events if event.kind == "block"]
    assert set(block) == {pool.names[k] for k in [worst, *best_of(pool, task, 2)]}
    moved = weights_of(cook(pool, task, "crossfit", **{**given, "lr": 0.2}))
    assert int((moved != 0).any(dim=1).sum()) == 3


def test_as_many_as_there_are_is_no_limit(tmp_path: Path) -> None:
    pool, task = uneven(tmp_path)
    plain = weights_of(cook(pool, task, "crossfit", **FOLDED))
    for among in (6, 100):
        assert torch.equal(plain, weights_of(cook(pool, task, "crossfit", among=among, **FOLDED)))


def test_permuting_ingredients_permutes_the_weights(tmp_path: Path) -> None:
    states = [{n: v.double() for n, v in s.items()} for s in fine_tunes(mlp, 5, steps=2)]
    task = Task(mlp().double(), samples(24, dtype=torch.float64))
    order = [3, 0, 4, 2, 1]
    given = {**FOLDED, "among": 3, "start": ["greedy", "top"]}
    plain = weights_of(cook(write(tmp_path / "plain", states), task, "crossfit", **given))
    turned = write(tmp_path / "turned", [states[k] for k in order])
    assert (plain[order] - weights_of(cook(turned, task, "crossfit", **given))).abs().max() <= 1e-8


def test_how_many_blocks_that_takes() -> None:
    def sizes(method: str, **given: Any) -> list[int]:
        return [len(block) for block in blocks_for(settings_for(method, **given), 72)]

    assert sizes("mehl+", among=30) == [18, 12]
    assert sizes("mehl+", among=5) == [5]
    assert sizes("crossfit", among=100) == [72]
    assert sizes("mehl+") == [18, 18, 18, 18]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(MethodError, match="setting among: expected at least 1, or None for all"):
        settings_for("crossfit", among=0)
    with pytest.raises(MethodError, match="setting among: expected None, when parametrisation"):
        settings_for("learned+", among=3)
    assert settings_for("crossfit", preset="authors").among is None
