"""Learning that has to stop says where, and hands over the best soup so far; see also test_method_setbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot import Event, Soup, Task, cook
from stockpot.errors import LearningError
from stockpot.pool import Pool
from zoo import fine_tunes, mlp, samples, write

BRIEF: dict[str, Any] = {"steps": 6, "batch_size": 16, "lr": 0.05, "block_size": 2}


class Fuse:
    """A loss that is NaN, while learning, once so many steps were taken."""

    def __init__(self, after: int, bad: float = float("nan")) -> None:
        self.after, self.bad, self.steps = after, bad, 0

    def listen(self, event: Event) -> None:
        self.steps += event.kind in ("step", "skipped")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return value * self.bad if self.steps >= self.after and torch.is_grad_enabled() else value


def stopped(
    folder: Path, fuse: Fuse, method: str = "mehl+", **settings: Any
) -> tuple[LearningError, Pool, Task]:
    pool, task = write(folder, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=fuse.loss)
    with pytest.raises(LearningError) as caught:
        cook(pool, task, method, listen=fuse.listen, **{**BRIEF, **settings})
    return caught.value, pool, task


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_visit_that_skipped_most_of_its_steps_says_where_and_why(tmp_path: Path, bad: float) -> None:
    error, _, _ = stopped(tmp_path / "pool", Fuse(8, bad))
    text = str(error)
    assert "learning at block 2 of 2, step 6: expected steps whose loss and gradient are finite" in text
    assert "found 4 of 6 skipped." in text
    assert "Fix: lower lr, look for what the loss cannot take" in text
    assert "the best soup so far is in the error's .best" in text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preset": "authors"},
        {"unit_norm": True, "lr": 0.01},
        {"centre": "soup"},
        {"decentralise": False},
        {"method": "learned+", "block_size": None},
    ],
)
def test_the_best_so_far_is_the_soup_of_the_lowest_loss(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Each batch is all of the data, so the loss falls: best are the coefficients of the last loss that was finite."""
    given = {"schedule": "constant", **settings, "warmup": 0.0, "batch_size": 48}
    method = given.pop("method", "mehl+")
    fuse = Fuse(2)
    losses: list[float] = []

    def listen(event: Event) -> None:
        fuse.steps += event.kind in ("step", "skipped")
        losses.extend([event.data["loss"]] if event.kind == "step" else [])

    pool, task = write(tmp_path / "pool", fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=fuse.loss)
    with pytest.raises(LearningError) as caught:
        cook(pool, task, method, listen=listen, **{**BRIEF, **given})
    assert len(losses) == 2
    assert losses[1] < losses[0]
    soup = caught.value.best
    assert isinstance(soup, Soup)
    assert soup.about["stopped"] == str(caught.value)
    shorter = {**BRIEF, **given, "steps": 1, "blocks": 1}
    wanted = cook(pool, Task(mlp(), samples()), method, **shorter).soup
    assert wanted is not None
    assert (wanted.W - 1 / 4).abs().max() > 1e-4
    assert (soup.W - wanted.W).abs().max() <= 1e-7
    saved = Soup.load(soup.save(tmp_path / "soup"))
    assert torch.equal(saved.W, soup.W)


def test_with_folds_it_says_which(tmp_path: Path) -> None:
    error, _, _ = stopped(tmp_path, Fuse(5), "crossfit", folds=2, evaluations=6)
    assert "learning at block 1 of 2, step 6, fold 2" in str(error)
    assert isinstance(error.best, Soup)


def test_a_held_out_loss_that_is_not_finite_is_never_the_best_and_is_plain_json(tmp_path: Path) -> None:
    def odd(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss if torch.is_grad_enabled() else loss * float("nan")

    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=odd)
    result = cook(pool, task, "crossfit", guard=False, start="mean", **{**BRIEF, "folds": 2})
    assert result.soup is not None
    assert torch.equal(result.soup.W, torch.full_like(result.soup.W, 0.25))
    assert {h["loss"] for h in result.history if h["kind"] == "held_out"} == {None}
