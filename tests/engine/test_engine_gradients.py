"""Coefficient gradients from one backward pass equal autograd through all K models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stockpot.engine import Descent, Directions, Live
from stockpot.pool import Pool
from stockpot.soups.classic import Classic
from stockpot.soups.settings import Settings, settings_for
from stockpot.task import Task
from zoo import Tied, fine_tunes, layout_of, mlp, normed, samples, write

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
BATCH = torch.tensor([0, 5, 7, 11, 13, 21, 22, 40])


def pool_and_task(folder: Path, build: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[Pool, Task]:
    def made() -> nn.Module:
        return build().to(dtype)

    return write(folder, fine_tunes(made, 5)), Task(made(), samples(dtype=dtype))


def learners_gradient(
    pool: Pool, task: Task, settings: Settings, raw: Tensor, temperature: float | None
) -> Descent:
    """All K models loaded at the coefficients `raw` (K, G); the gradient of BATCH is in raw.grad."""
    granularity = settings.granularity
    assert isinstance(granularity, str)
    with Live(task, pool, layout_of(pool, granularity)) as live, task.learning():
        mean = live.mean()
        rows = torch.stack([live.read(k, out=torch.empty_like(mean)) for k in range(len(pool))]) - mean
        descent = Descent(live, Directions(rows, live.plan), mean, raw, temperature, settings, steps=1)
        descent.gradient(task.fit, BATCH)
        return descent


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("method", ["learned", "learned+", "hl", "hl+"])
@pytest.mark.parametrize("build", [mlp, Tied, normed])
def test_gradients_equal_autograd_through_the_whole_graph(
    tmp_path: Path, build: Callable[[], nn.Module], method: str, dtype: torch.dtype
) -> None:
    pool, task = pool_and_task(tmp_path, build, dtype)
    settings = settings_for(method, label_smoothing=0.1)
    classic = Classic(
        pool, task, layout_of(pool, str(settings.granularity)), simplex=method.startswith("learned")
    )
    with torch.no_grad():
        classic.raw.normal_(generator=torch.Generator().manual_seed(3)).mul_(0.5)
    wanted = classic.gradient(BATCH, label_smoothing=0.1)

    found = learners_gradient(pool, task, settings, classic.raw.detach(), None).raw.grad

    assert found is not None
    assert found.dtype == dtype
    assert wanted.abs().max() > 1e-4  # there is something to compare
    assert (found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


def test_the_gradient_of_the_temperature_is_autograds(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path, mlp, torch.float64)
    classic = Classic(pool, task, layout_of(pool, "model"), simplex=True)
    temperature = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    with task.learning():
        (wanted,) = torch.autograd.grad(classic.loss(BATCH, temperature=temperature), temperature)

    descent = learners_gradient(pool, task, settings_for("learned"), classic.raw.detach(), 1.3)

    assert descent.temperature is not None
    assert descent.temperature.grad is not None
    assert float((descent.temperature.grad - wanted).abs()) <= 1e-10 * float(wanted.abs())


@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path, pieces: int) -> None:
    pool, task = pool_and_task(tmp_path, mlp, torch.float64)
    raw = torch.zeros(5, 4, dtype=torch.float64)
    whole = learners_gradient(pool, task, settings_for("hl+"), raw, None).raw.grad
    parts = learners_gradient(pool, task, settings_for("hl+", accumulate=pieces), raw, None).raw.grad
    assert whole is not None
    assert parts is not None
    assert (whole - parts).abs().max() <= 1e-12 * whole.abs().max()
    assert not torch.equal(whole, parts) or pieces == 1  # the batch was cut indeed


def test_going_back_takes_the_temperature_along(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path, mlp, torch.float64)
    raw = torch.zeros(5, len(layout_of(pool, "tensor")), dtype=torch.float64)
    descent = learners_gradient(pool, task, settings_for("hl+"), raw, 1.3)
    assert descent.temperature is not None
    with torch.no_grad():
        descent.temperature.fill_(7.0)
    descent.go_back(raw + 1, 1.3, 0)
    assert float(descent.temperature.detach()) == pytest.approx(1.3)
    assert torch.equal(descent.raw.detach(), raw + 1)


def test_a_step_is_only_as_healthy_as_the_temperatures_gradient(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path, mlp, torch.float64)
    raw = torch.zeros(5, len(layout_of(pool, "tensor")), dtype=torch.float64)
    descent = learners_gradient(pool, task, settings_for("hl+"), raw, 1.3)
    loss = torch.ones((), dtype=torch.float64)
    assert descent._health(loss).isfinite()
    assert descent.temperature is not None
    descent.temperature.grad = torch.full_like(descent.temperature, 1e200)  # the optimiser squares it
    assert not descent._health(loss).isfinite()
