"""Learning that has to stop says where, and hands over the best soup so far."""

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
    """A loss that is NaN once so many steps were taken."""

    def __init__(self, after: int, bad: float = float("nan")) -> None:
        self.after, self.bad, self.steps = after, bad, 0

    def listen(self, event: Event) -> None:
        self.steps += event.kind == "step"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return value * self.bad if self.steps >= self.after else value


def stopped(
    folder: Path, fuse: Fuse, method: str = "mehl+", **settings: Any
) -> tuple[LearningError, Pool, Task]:
    pool, task = write(folder, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=fuse.loss)
    with pytest.raises(LearningError) as caught:
        cook(pool, task, method, listen=fuse.listen, **{**BRIEF, **settings})
    return caught.value, pool, task


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_says_where_and_why(tmp_path: Path, bad: float) -> None:
    error, _, _ = stopped(tmp_path / "pool", Fuse(8, bad))
    text = str(error)
    assert f"loss at block 2 of 2, step 3: expected a finite number, found {bad}" in text
    assert "Fix: lower lr, check the data for NaN, or use fp32 instead of fp16 autocast" in text
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
def test_the_best_so_far_is_the_soup_of_the_last_good_step(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Stopped in step j, the coefficients are those of a run of one step less, whose loss was known to be finite."""
    given = {"schedule": "constant", **settings, "warmup": 0.0}
    method = given.pop("method", "mehl+")
    whole_block = {**given, "steps": 3}
    error, pool, _ = stopped(tmp_path / "pool", Fuse(2), method, **whole_block)
    soup = error.best
    assert isinstance(soup, Soup)
    assert soup.about["stopped"] == str(error)
    shorter = {**BRIEF, **given, "steps": 1, "blocks": 1}
    wanted = cook(pool, Task(mlp(), samples()), method, **shorter).soup
    assert wanted is not None
    assert (wanted.W - 1 / 4).abs().max() > 1e-4
    assert (soup.W - wanted.W).abs().max() <= 1e-7
    saved = Soup.load(soup.save(tmp_path / "soup"))
    assert torch.equal(saved.W, soup.W)


def test_with_folds_the_best_on_held_out_data_is_kept(tmp_path: Path) -> None:
    error, _, _ = stopped(tmp_path, Fuse(5), "crossfit", folds=2, evaluations=6)
    assert "loss at block 1 of 2, step 6, fold 1" in str(error)
    assert isinstance(error.best, Soup)


def test_a_gradient_that_is_not_finite_in_the_very_last_step(tmp_path: Path) -> None:
    """The loss is finite, but W would not be: no step follows that could notice."""

    def steep(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss + 0 * (loss - loss.detach()).sqrt() if fuse.steps == 5 else loss  # slope of sqrt at 0

    fuse = Fuse(99)
    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=steep)
    with pytest.raises(
        LearningError, match="block 1 of 1, step 6: expected a finite number, found a gradient"
    ) as caught:
        cook(pool, task, "hl", listen=fuse.listen, **{**BRIEF, "block_size": None})
    assert isinstance(caught.value.best, Soup)
    assert (caught.value.best.W - 0.25).abs().max() > 1e-3


def test_a_held_out_loss_that_is_not_finite_is_never_the_best_and_is_plain_json(tmp_path: Path) -> None:
    def odd(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss if torch.is_grad_enabled() else loss * float("nan")

    pool, task = write(tmp_path, fine_tunes(mlp, 4)), Task(mlp(), samples(), loss=odd)
    result = cook(pool, task, "crossfit", guard=False, **{**BRIEF, "folds": 2})
    assert result.soup is not None
    assert torch.equal(result.soup.W, torch.full_like(result.soup.W, 0.25))
    assert {h["loss"] for h in result.history if h["kind"] == "held_out"} == {None}
