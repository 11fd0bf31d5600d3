"""A model's groups move together at the learning rate, and each for itself at a share of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from stockpot import cook
from stockpot.engine import engine
from stockpot.engine.descent import Descent
from stockpot.errors import LearningError, MethodError
from stockpot.methods.settings import settings_for
from stockpot.recipe.build import build_settings
from stockpot.recipe.load import make_recipe
from zoo import learning, mlp, zoo

WHOLE: dict[str, Any] = {"batch_size": 10_000, "schedule": "constant", "weight_decay": 0.0}


def weights_of(pool: Any, task: Any, method: str, **settings: Any) -> Tensor:
    soup = cook(pool, task, method, **{**WHOLE, **settings}).soup
    assert soup is not None
    return Tensor(soup.W)


def test_a_plain_gradient_step_is_the_models_own_and_a_share_of_the_groups(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    given = {"optimizer": "sgd", "lr": 0.3, "steps": 1}
    together = weights_of(pool, task, "hl", **given) - 0.25  # (K, 1)
    each = weights_of(pool, task, "hl+", **given) - 0.25  # (K, G)
    both = weights_of(pool, task, "hl+", **given, apart=0.4) - 0.25
    assert together.abs().max() > 1e-3
    assert (both - (together + 0.4 * each)).abs().max() <= 1e-6


@pytest.mark.parametrize("apart", [0.25, 1.0])
def test_it_is_adamw_on_two_sets_of_coefficients(tmp_path: Path, apart: float) -> None:
    pool, task = zoo(tmp_path, 4)
    lr, steps = 0.05, 6
    soup = cook(pool, task, "hl+", lr=lr, steps=steps, apart=apart, **WHOLE).soup
    assert soup is not None
    x, y = task.fit.batch(torch.arange(len(task.fit)))
    names = list(soup.layout.groups)  # one tensor each
    states = [{name: pool.tensor(k, name) for name in names} for k in range(4)]
    mean = {n: torch.stack([s[n] for s in states]).mean(dim=0) for n in names}
    own = torch.zeros(4, len(names), requires_grad=True)
    common = torch.zeros(4, 1, requires_grad=True)
    optimizer = torch.optim.AdamW(
        [{"params": [own], "lr": apart * lr}, {"params": [common], "lr": lr}], weight_decay=0.0
    )
    model = mlp()
    for _ in range(steps):
        c = own + common
        theta = {
            n: mean[n] + sum(c[k, j] * (states[k][n] - mean[n]) for k in range(4))
            for j, n in enumerate(names)
        }
        loss = functional.cross_entropy(functional_call(model, theta, (x,)), y)
        own.grad, common.grad = torch.autograd.grad(loss, [own, common])
        optimizer.step()
    wanted = (own + common).detach().double()
    wanted = 0.25 + wanted - wanted.mean(dim=0, keepdim=True)
    assert (soup.W - wanted).abs().max() <= 2e-4
    assert (soup.W - 0.25).abs().max() > 0.05


def test_weights_decay_as_they_do_without_it(tmp_path: Path) -> None:
    """From a start far from the mean, and with steps that are much smaller than the decay."""
    pool, task = zoo(tmp_path, 4)
    given = {"start": "greedy", "lr": 1e-3, "steps": 40, "weight_decay": 20.0}
    plain = weights_of(pool, task, "hl+", **given) - 0.25
    both = weights_of(pool, task, "hl+", **given, apart=0.1) - 0.25
    begun = weights_of(pool, task, "hl+", **{**given, "lr": 0.0}) - 0.25
    assert float(plain.norm() / begun.norm()) < 0.6
    assert float(both.norm() / plain.norm()) == pytest.approx(1, abs=0.1)


def test_nothing_but_coefficients_decays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing has a slope, a factor on the logits stays; it has no reason to be drawn to zero."""
    pool, task = zoo(tmp_path, 4)

    class Level(Descent):
        def gradient(self, *given: Any) -> Tensor:
            loss = super().gradient(*given)
            for one in (self.raw, self.together, self.temperature):
                assert one is not None
                assert one.grad is not None
                one.grad.zero_()
            return loss

    monkeypatch.setattr(engine, "Descent", Level)
    given = {**WHOLE, "weight_decay": 2.0, "temperature": True, "apart": 0.5, "lr": 0.1, "steps": 5}
    with learning(pool, task, "hl+", **given) as learner:
        learner.run()
        assert learner.tracks[0].temperature == 1.0


@pytest.mark.parametrize("apart", [None, 0.3])
def test_setbacks_slow_both_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: float | None
) -> None:
    pool, task = zoo(tmp_path, 4)
    given = {"optimizer": "sgd", "lr": 0.2, "steps": 1, "apart": apart}
    whole = weights_of(pool, task, "hl+", **given) - 0.25

    class Slowed(Descent):
        def slow(self, factor: float) -> None:
            super().slow(factor / 2)

    monkeypatch.setattr(engine, "Descent", Slowed)
    assert whole.abs().max() > 1e-3
    assert (weights_of(pool, task, "hl+", **given) - 0.25 - whole / 2).abs().max() <= 1e-6


def test_clipping_is_of_both_parts_together(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 4)
    given = {"optimizer": "sgd", "lr": 1.0, "steps": 1}
    each = weights_of(pool, task, "hl+", **given) - 0.25  # minus the gradient, without what all models share
    common = each.sum(dim=1, keepdim=True)
    clipped = weights_of(pool, task, "hl+", **given, apart=1.0, clip=1e-3) - 0.25
    wanted = each + common
    assert torch.nn.functional.cosine_similarity(clipped.flatten(), wanted.flatten(), dim=0) > 0.999
    assert clipped.abs().max() <= 2e-3  # each of the two by at most 0.001


def test_a_sum_that_overflows_is_not_stepped_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = zoo(tmp_path, 4)

    class Huge(Descent):
        def gradient(self, *given: Any) -> Tensor:
            loss = super().gradient(*given)
            assert self.together is not None
            self.together.grad = torch.full_like(self.together, 1e30)  # whose square is not finite
            return loss

    monkeypatch.setattr(engine, "Descent", Huge)
    with pytest.raises(LearningError, match="1 of 1 skipped"):
        weights_of(pool, task, "hl+", lr=0.1, steps=1, apart=0.5)


def test_in_between_nothing_is_left_to_fold(tmp_path: Path) -> None:
    """As small a share as there is: every model moves as a whole."""
    pool, task = zoo(tmp_path, 4)
    W = weights_of(pool, task, "hl+", lr=0.05, steps=5, apart=1e-6)
    assert (W - W[:, :1]).abs().max() < 1e-5
    assert (W - weights_of(pool, task, "hl", lr=0.05, steps=5)).abs().max() < 1e-4


@pytest.mark.parametrize("apart", [0.0, -0.1, 1.5])
def test_shares_that_are_none_are_refused(apart: float) -> None:
    with pytest.raises(MethodError, match="setting apart: expected more than 0 and at most 1, or None"):
        settings_for("hl+", apart=apart)
    with pytest.raises(MethodError, match="setting apart: expected None, when coarse"):
        settings_for("hl+", apart=0.5, coarse=0.5)


@pytest.mark.parametrize(("method", "preset"), [("hl", None), ("mehl", None), ("mehl+", "authors")])
def test_where_nothing_can_part_it_is_refused(method: str, preset: str | None) -> None:
    with pytest.raises(MethodError, match="setting apart: expected None, when a model has one coefficient"):
        settings_for(method, preset, apart=0.5)


def test_in_a_recipe_of_several_methods_it_is_not_the_papers() -> None:
    recipe = make_recipe(
        {
            "pool": {"path": "pool"},
            "model": {"python": "model:build"},
            "data": {"arrays": "data.npz", "fit": 0.5},
            "method": {"methods": ["hl+", "crossfit"], "apart": 0.5},
        },
        ".",
    )
    assert build_settings(recipe, "hl+").apart is None
