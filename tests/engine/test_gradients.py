"""Coefficient gradients from one backward pass equal autograd through all K models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from classic import Classic
from stockpot.engine import Engine, Live, Options
from stockpot.engine import engine as engines
from stockpot.pool import Pool
from stockpot.task import Task
from zoo import Tied, fine_tunes, layout_of, mlp, normed, samples, write

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
BATCH = torch.tensor([0, 5, 7, 11, 13, 21, 22, 40])


def pool_and_task(
    folder: Path, build: Callable[[], nn.Module], dtype: torch.dtype, **options: Any
) -> tuple[Pool, Task]:
    def made() -> nn.Module:
        return build().to(dtype)

    return write(folder, fine_tunes(made, 5)), Task(made(), samples(dtype=dtype), **options)


def gradient(
    pool: Pool,
    task: Task,
    granularity: str,
    alpha: Tensor,
    *,
    beta: float | None = None,
    simplex: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss, slope (K, G) and beta's slope of BATCH with all K models loaded, at the coefficients alpha (K, G)."""
    with Live(task, pool, layout_of(pool, granularity)) as live, task.learning():
        engine = Engine(live, Options(**options), task.fit, block_size=len(pool))
        everything = list(range(len(pool)))
        D = engine.load(everything)
        c = alpha.softmax(dim=0) if simplex else alpha
        engine.mix(engine.theta_fix(torch.zeros_like(alpha), everything), c)
        factor = None if beta is None else torch.tensor(beta, dtype=live.dtype)
        loss, slope, of_beta = engine.gradient(D, engine.batch(task.fit, BATCH), factor)
        engine.close()
        if simplex:
            slope = c * (slope - (c * slope).sum(dim=0, keepdim=True))
        return loss, slope, of_beta


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("simplex", [True, False])
@pytest.mark.parametrize("granularity", ["model", "tensor"])
@pytest.mark.parametrize("build", [mlp, Tied, normed])
def test_gradients_equal_autograd_through_the_whole_graph(
    tmp_path: Path, build: Callable[[], nn.Module], granularity: str, simplex: bool, dtype: torch.dtype
) -> None:
    pool, task = pool_and_task(tmp_path, build, dtype)
    classic = Classic(pool, task, layout_of(pool, granularity), simplex=simplex)
    with torch.no_grad():
        classic.raw.normal_(generator=torch.Generator().manual_seed(3)).mul_(0.5)
    wanted = classic.gradient(BATCH)
    _, found, _ = gradient(pool, task, granularity, classic.raw.detach(), simplex=simplex)
    assert found.dtype == dtype
    assert wanted.abs().max() > 1e-4  # there is something to compare
    assert (found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


def test_the_gradient_of_beta_is_autograds(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path, mlp, torch.float64)
    classic = Classic(pool, task, layout_of(pool, "model"), simplex=True)
    beta = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    with task.learning():
        (wanted,) = torch.autograd.grad(classic.loss(BATCH, beta=beta), beta)
    _, _, found = gradient(pool, task, "model", classic.raw.detach(), beta=1.3, simplex=True)
    assert found is not None
    assert float((found - wanted).abs()) <= 1e-10 * float(wanted.abs())


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("pieces", [2, 3, 8])
def test_a_batch_in_pieces_has_the_gradient_of_the_whole(tmp_path: Path, pieces: int, low_memory: bool) -> None:
    pool, task = pool_and_task(tmp_path, mlp, torch.float64)
    alpha = torch.zeros(5, 4, dtype=torch.float64)
    loss, whole, _ = gradient(pool, task, "tensor", alpha)
    other, parts, _ = gradient(pool, task, "tensor", alpha, accumulate=pieces, low_memory=low_memory)
    assert (whole - parts).abs().max() <= 1e-12 * whole.abs().max()
    assert float(loss) == pytest.approx(float(other), rel=1e-12)
    assert not torch.equal(whole, parts)  # the batch was cut indeed


def test_pieces_of_unequal_weight_add_up(tmp_path: Path) -> None:
    """As for tokens: a loss that is a sum and a weight, where one piece has much more weight than the other."""

    def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        tokens = 1.0 + 9 * (y == 0)
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        return (losses * tokens).sum(), tokens.sum()

    pool, task = pool_and_task(tmp_path, mlp, torch.float64, loss=weighted)
    alpha = torch.zeros(5, 4, dtype=torch.float64)
    loss, whole, _ = gradient(pool, task, "tensor", alpha)
    for pieces in (2, 5):
        other, parts, _ = gradient(pool, task, "tensor", alpha, accumulate=pieces)
        assert (whole - parts).abs().max() <= 1e-12 * whole.abs().max()
        assert float(loss) == pytest.approx(float(other), rel=1e-12)


def test_small_gradients_survive_fp16_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest number of fp16 is 6e-8: without a factor on the loss, the gradient of a batch would be zero."""

    def timid(model: nn.Module, batch: Any) -> Tensor:
        return 2e-7 * nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    pool, exact = pool_and_task(tmp_path / "a", mlp, torch.float32, loss=timid)
    _, narrow = pool_and_task(tmp_path / "b", mlp, torch.float32, loss=timid, autocast=torch.float16)
    alpha = torch.zeros(5, 4)
    _, wanted, _ = gradient(pool, exact, "tensor", alpha)
    _, found, _ = gradient(pool, narrow, "tensor", alpha)
    assert (found - wanted).norm() <= 0.02 * wanted.norm()
    monkeypatch.setattr(engines, "FP16_SCALES", (1.0,))
    _, lost, _ = gradient(pool, narrow, "tensor", alpha)
    assert (lost - wanted).norm() > 0.2 * wanted.norm()  # so that it made a difference


def test_where_the_scaled_loss_overflows_it_is_done_again_without(tmp_path: Path) -> None:
    def steep(model: nn.Module, batch: Any) -> Tensor:
        return 300 * nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    pool, exact = pool_and_task(tmp_path / "a", mlp, torch.float32, loss=steep)
    _, narrow = pool_and_task(tmp_path / "b", mlp, torch.float32, loss=steep, autocast=torch.float16)
    _, wanted, _ = gradient(pool, exact, "tensor", torch.zeros(5, 4))
    _, found, _ = gradient(pool, narrow, "tensor", torch.zeros(5, 4))
    assert (found - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("directions", ["fp32", "bf16", "int8"])
def test_low_memory_mode_projects_what_the_usual_way_does(tmp_path: Path, directions: str) -> None:
    pool, task = pool_and_task(tmp_path, Tied, torch.float32)
    alpha = 0.1 * torch.ones(5, len(layout_of(pool, "tensor")))
    _, usual, _ = gradient(pool, task, "tensor", alpha, directions=directions)
    _, spared, _ = gradient(pool, task, "tensor", alpha, directions=directions, low_memory=True)
    assert (usual - spared).abs().max() <= 1e-5 * usual.abs().max()


def test_a_batch_of_masked_samples_alone_teaches_nothing(tmp_path: Path) -> None:
    """0/0 would be a step that counts as broken."""
    x, y = samples()
    x[BATCH] = 0

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        weight = batch[0].flatten(1).any(dim=1)
        return (nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") * weight).sum(), weight.sum()

    pool, task = write(tmp_path, fine_tunes(mlp, 3)), Task(mlp(), (x, y), loss=loss)
    found, slope, _ = gradient(pool, task, "model", torch.zeros(3, 1))
    assert found == 0
    assert not slope.any()
