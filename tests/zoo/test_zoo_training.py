"""Claims about one training run: schedule, decay, modes, and continuing at any step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stockpot.errors import RunError
from stockpot.events import Event
from stockpot.task import Data, Task
from stockpot.zoo.folder import Saved, weights_of
from stockpot.zoo.plan import Plan, Trial
from stockpot.zoo.training import DivergedError, Optimiser, train
from zoo import mlp, normed, same, samples

TRIAL = Trial(lr=0.02, weight_decay=0.1, epochs=4, label_smoothing=0.1, augmentation=0.5, seed=3)
PLAN = Plan((TRIAL,), batch_size=16, probe=None)


class StopError(Exception):
    """Stands for a kill."""


def seeded(build: type[nn.Module] | object = normed) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = build()  # type: ignore[operator]
    return model


def run(model: nn.Module, plan: Plan = PLAN, saved: Saved | None = None, stop_at: int | None = None) -> list[float]:
    data = Data.of(samples(40))

    def listen(event: Event) -> None:
        assert event.data["trial"] == "trial_000"
        if event.data["epoch"] == stop_at:
            raise StopError

    model.train()
    options: Any = {"parameters": model.parameters(), "about": {"trial": "trial_000"}, "listen": listen}
    return train(Task(model, data), plan.trials[0], plan, saved=saved, **options).losses


def test_the_loss_falls_and_one_is_kept_for_each_epoch() -> None:
    losses = run(seeded(mlp), Plan((Trial(lr=0.05, epochs=8),), batch_size=8, probe=None))
    assert len(losses) == 8
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("stop_at", [2, 3])
def test_a_killed_run_continues_to_the_same_bits(tmp_path: Path, optimizer: str, stop_at: int) -> None:
    # Dropout, batch statistics and augmentation are all at work here.
    plan = Plan((TRIAL,), batch_size=16, probe=None, optimizer=optimizer)  # type: ignore[arg-type]
    whole = seeded()
    losses = run(whole, plan)
    saved = Saved(tmp_path / "state.safetensors", 0.0, tmp_path)
    with pytest.raises(StopError):
        run(seeded(), plan, saved, stop_at)
    continued = seeded()
    assert run(continued, plan, saved) == losses
    assert same(weights_of(continued), weights_of(whole))


def test_continuing_does_not_start_over(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "state.safetensors", 0.0, tmp_path)
    with pytest.raises(StopError):
        run(seeded(), PLAN, saved, stop_at=3)
    found = saved.load()
    assert found is not None
    assert found[1]["course"]["step"] > 3


def test_a_state_that_cannot_be_read_costs_time_only(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"half a file")
    model, again = seeded(), seeded()
    run(model, PLAN)
    run(again, PLAN, Saved(path, 300.0, tmp_path))
    assert same(weights_of(model), weights_of(again))


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "state.safetensors", 0.0, tmp_path)
    saved.save({"model.0.weight": torch.ones(2, 2)}, {"course": {"step": 3}})
    with pytest.raises(RunError, match=r"state.safetensors: expected the state of this trial, found TaskError"):
        run(seeded(), PLAN, saved)
    saved.save(
        {f"model.{k}": v for k, v in weights_of(seeded()).items()}, {"course": {"steps": 1, "turn": 2}, "scaler": {}}
    )
    with pytest.raises(RunError, match=r"found TypeError: .*turn"):
        run(seeded(), PLAN, saved)


def test_the_callers_random_numbers_are_not_touched() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(seeded())
    assert torch.equal(torch.rand(3), expected)


def test_the_rate_rises_and_then_follows_a_cosine_to_zero() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    plan = Plan((TRIAL,), warmup=0.2, clip=None)
    optimiser = Optimiser([parameter], Trial(1.0), 20, plan, scaled=False)
    rates = []
    for step in range(20):
        optimiser.step(parameter.sum(), step)
        rates.append(optimiser._optimizer.param_groups[0]["lr"])
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert 0 < rates[-1] < 0.02


def test_decay_shrinks_matrices_and_leaves_biases() -> None:
    matrix, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimiser = Optimiser([matrix, bias], Trial(0.1, 0.5), 10, Plan((TRIAL,), warmup=0.0), scaled=False)
    for step in range(10):
        optimiser.step(0.0 * (matrix.sum() + bias.sum()), step)
    assert float(matrix.detach().max()) < 0.9
    assert torch.equal(bias, torch.ones(2))


def test_gradients_are_clipped_to_the_norm_asked_for() -> None:
    moved = {}
    for clip in (None, 0.5):
        parameter = nn.Parameter(torch.zeros(4, 4))
        plan = Plan((TRIAL,), optimizer="sgd", warmup=0.0, clip=clip)
        Optimiser([parameter], Trial(1.0), 1, plan, scaled=False).step(100 * parameter.sum(), 0)
        moved[clip] = float(parameter.detach().norm())
    assert moved == {None: pytest.approx(400.0), 0.5: pytest.approx(0.5, rel=1e-3)}


def test_the_step_at_which_the_loss_stopped_being_a_number_is_named() -> None:
    model = seeded(mlp)
    with pytest.raises(DivergedError, match=r"the loss became (nan|inf) at step \d+ of 10"):
        run(model, Plan((Trial(lr=1e20, weight_decay=1e5, epochs=4),), batch_size=16, probe=None))


def test_a_last_step_that_ruins_the_weights_is_noticed() -> None:
    model, data = seeded(mlp), Data.of(samples(16))
    plan = Plan((Trial(lr=1e37, epochs=1),), probe=None, optimizer="sgd", warmup=0.0, clip=None)
    task = Task(model, data, loss=lambda model, batch: 1e3 * model(batch[0]).sum())
    with pytest.raises(DivergedError, match=r"0.weight is not finite at step 1 of 1"):
        train(task, plan.trials[0], plan, parameters=model.parameters(), about={})


def test_batch_statistics_are_learned() -> None:
    model = seeded(normed)
    before = weights_of(model)
    run(model)
    after = weights_of(model)
    assert not torch.equal(before["1.running_mean"], after["1.running_mean"])
    assert int(after["1.num_batches_tracked"]) == 10
