"""The user's model while its tensors are views of one vector, and after."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from stockpot import cook
from stockpot.engine import FlatPlan, Live
from stockpot.errors import TaskError
from stockpot.soup import Soup
from stockpot.task import Task
from zoo import Tied, fine_tunes, layout_of, mlp, normed, same, samples, write, zoo


def test_parameters_are_views_of_theta_and_the_model_owns_them_again_afterwards(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    flags = [True, False, True, True]
    for parameter, flag in zip(task.model.parameters(), flags, strict=True):
        parameter.requires_grad_(flag)
    with Live(task, pool, layout_of(pool)) as live:
        live.load_ingredient(2)
        live.theta.mul_(2)
        assert all(torch.equal(value, 2 * pool.tensor(2, name)) for name, value in task.model.state_dict().items())
        kept = {name: value.clone() for name, value in task.model.state_dict().items()}
    live.theta.zero_()
    assert same(task.model.state_dict(), kept)
    assert [parameter.requires_grad for parameter in task.model.parameters()] == flags
    assert all(parameter.grad is None for parameter in task.model.parameters())


def test_a_model_of_another_dtype_follows_by_copies(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 3))
    task = Task(mlp().to(torch.bfloat16), samples(dtype=torch.bfloat16))
    with Live(task, pool, layout_of(pool)) as live:
        live.load_ingredient(1)
        weight = task.model.state_dict()["0.weight"]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, pool.tensor(1, "0.weight").bfloat16())
        torch.autograd.backward(task.loss(task.fit.batch(torch.arange(8))).mean)
        gradient = live.collect_gradient()
        assert gradient.dtype == torch.float32
        assert gradient.abs().max() > 0
        live.clear_gradient()
        assert live.collect_gradient().abs().max() == 0


def test_the_mean_is_the_uniform_soup_to_the_last_bit(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    soup = Soup.uniform(pool).state_dict()
    with Live(task, pool, layout_of(pool)) as live:
        live.theta.copy_(live.mean())
        assert same(task.model.state_dict(), soup)


def test_an_ingredient_brings_its_own_statistics_and_integers(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 3, build=normed)
    with Live(task, pool, layout_of(pool)) as live:
        live.load_ingredient(2)
        for name, value in task.model.state_dict().items():
            assert torch.equal(value, pool.tensor(2, name)), name


def test_tied_tensors_have_one_place_and_groups_lie_side_by_side(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(Tied, 3))
    layout = layout_of(pool, "module")
    plan = FlatPlan.of(layout, pool.specs)
    assert [slot.names for slot in plan.slots] == [("head.bias",), ("head.weight",), ("inner.weight", "outer.weight")]
    assert plan.size == sum(spec.numel for spec in pool.specs.values()) - pool.specs["outer.weight"].numel
    assert plan.bounds[0][1] == plan.bounds[1][0]
    assert [plan.bounds[slot.group][0] <= slot.start < slot.stop <= plan.bounds[slot.group][1] for slot in plan.slots]


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.outer.weight = nn.Parameter(self.outer.weight.detach().clone())


@pytest.mark.parametrize("exclude", [None, ["outer.weight"]])
def test_a_model_that_ties_what_the_checkpoints_do_not_is_refused(tmp_path: Path, exclude: list[str] | None) -> None:
    pool = write(tmp_path, fine_tunes(Untied, 3))
    task = Task(Tied(), samples())
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    with (
        pytest.raises(TaskError, match=r"the same values as inner\.weight in every checkpoint") as caught,
        Live(task, pool, layout_of(pool, exclude=exclude)),
    ):
        pass
    assert "model tensor outer.weight" in str(caught.value)
    assert "untie them in the model" in str(caught.value)
    assert same(task.model.state_dict(), before)
    assert all(parameter.requires_grad for parameter in task.model.parameters())


class MaxNorm(nn.Module):
    """Its forward pass gives a weight other memory, as networks with a max-norm constraint do."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.inner = nn.Linear(6, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when in ("always", "learning" if torch.is_grad_enabled() else "scoring"):
            self.outer.weight.data = torch.renorm(self.outer.weight.data, 2, 0, 1.0)
        elif self.when == "in place":
            self.outer.weight.data.copy_(torch.renorm(self.outer.weight.data, 2, 0, 1.0))
        out: torch.Tensor = self.outer(torch.tanh(self.inner(x)))
        return out


@pytest.mark.parametrize("method", ["best", "uniform", "greedy", "hl+", "crossfit"])
@pytest.mark.parametrize("when", ["always", "learning", "scoring"])
def test_a_model_that_takes_its_weights_elsewhere_is_refused(tmp_path: Path, when: str, method: str) -> None:
    """Otherwise it would be scored, silently, with weights of another soup."""
    pool = write(tmp_path, fine_tunes(lambda: MaxNorm("never"), 3))
    if when == "learning" and method in ("best", "uniform", "greedy"):
        return  # these never learn; refused all the same, because a loss is tried first
    if when == "scoring" and method in ("uniform", "hl+"):
        return  # the soup is loaded into the model itself, wherever its weights are
    task = Task(MaxNorm(when), samples())
    with pytest.raises(TaskError, match=r"model tensor outer\.weight: expected the memory it had before") as caught:
        cook(pool, task, method, steps=4, batch_size=16)
    assert "the model assigns to .data while it runs" in str(caught.value)
    assert "change the values in place (weight.data.copy_(...), renorm_)" in str(caught.value)


def test_a_model_that_changes_its_weights_in_place_is_cooked(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(lambda: MaxNorm("never"), 3))
    result = cook(pool, Task(MaxNorm("in place"), samples()), "hl+", steps=4, batch_size=16)
    assert result.soup is not None


def test_a_parameter_without_elements_is_no_reason_to_refuse(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = mlp()
        model.register_parameter("nothing", nn.Parameter(torch.empty(0, 4)))
        return model

    assert cook(write(tmp_path, fine_tunes(build, 3)), Task(build(), samples()), "hl+", steps=2).soup is not None
