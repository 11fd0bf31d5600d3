"""Losses of torch.nn given as they are: their mean over a batch, exactly, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stockpot.errors import TaskError
from stockpot.task import Task
from stockpot.task.loss import TORCH_LOSSES, Loss

from .models import Plain, blobs, linear

X, Y = blobs()
X = X.double()
DRAW = torch.Generator().manual_seed(3)
NUMBERS = torch.randn(60, 3, generator=DRAW, dtype=torch.float64)
SIGNS = torch.where(NUMBERS > 0, 1.0, -1.0).double()
SHARES = functional.softmax(NUMBERS, 1)
SOME = Y.clone()
SOME[:5] = 1
WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


def probability(logits: Tensor) -> Tensor:
    return logits.sigmoid()


def log_shares(logits: Tensor) -> Tensor:
    return logits.log_softmax(1)


# loss, targets, and what stands behind the model
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[[Tensor], Tensor] | None]] = {
    "mse": (nn.MSELoss, NUMBERS, None),
    "mse, one output": (nn.MSELoss, NUMBERS[:, 0], lambda x: x[:, :1]),
    "mse, targets (n, 1)": (nn.MSELoss, NUMBERS[:, :1], lambda x: x[:, 0]),
    "mse, float targets": (nn.MSELoss, NUMBERS.float(), None),
    "l1": (nn.L1Loss, NUMBERS, None),
    "smooth l1": (lambda: nn.SmoothL1Loss(beta=0.3), NUMBERS, None),
    "huber": (lambda: nn.HuberLoss(delta=0.4), NUMBERS, None),
    "bce": (nn.BCELoss, (NUMBERS > 0).double(), probability),
    "bce, logits": (lambda: nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS), (NUMBERS > 0).double(), None),
    "bce, whole numbers": (nn.BCEWithLogitsLoss, (NUMBERS > 0).long(), None),
    "poisson": (nn.PoissonNLLLoss, NUMBERS.exp().round(), None),
    "kl": (lambda: nn.KLDivLoss(reduction="batchmean"), SHARES, log_shares),
    "soft margin": (nn.SoftMarginLoss, SIGNS, None),
    "hinge embedding": (nn.HingeEmbeddingLoss, SIGNS, None),
    "cross-entropy": (nn.CrossEntropyLoss, Y, None),
    "cross-entropy, weights": (lambda: nn.CrossEntropyLoss(WEIGHTS), SOME, None),
    "cross-entropy, smooth": (lambda: nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), SOME, None),
    "cross-entropy, ignored": (lambda: nn.CrossEntropyLoss(WEIGHTS, ignore_index=1), SOME, None),
    "cross-entropy, shares": (lambda: nn.CrossEntropyLoss(WEIGHTS), SHARES, None),
    "nll": (lambda: nn.NLLLoss(WEIGHTS), SOME, log_shares),
    "multi margin": (lambda: nn.MultiMarginLoss(weight=WEIGHTS.double()), Y, None),
    "multi-label margin": (nn.MultiLabelMarginLoss, torch.stack([Y, torch.full_like(Y, -1), Y], 1), None),
    "multi-label soft margin": (lambda: nn.MultiLabelSoftMarginLoss(WEIGHTS), (NUMBERS > 0).double(), None),
}


def test_every_loss_that_is_taken_is_tried() -> None:
    assert {type(make()) for make, _, _ in CASES.values()} == set(TORCH_LOSSES)


@pytest.mark.parametrize("case", CASES)
def test_pieces_add_up_to_the_mean_of_the_whole(case: str) -> None:
    make, targets, behind = CASES[case]
    model = (linear() if behind is None else Plain(behind)).double()
    task = Task(model, (X, targets), loss=make(), metric="loss", batch_size=7)
    parts = [task.loss((X[rows], targets[rows])) for rows in torch.arange(60).tensor_split(7)]
    found = Loss(sum(p.total for p in parts), sum(p.weight for p in parts)).mean  # type: ignore[arg-type]
    outputs = model(X)
    if outputs.numel() == targets.numel():
        outputs, targets = outputs.reshape(targets.shape), targets.to(outputs if "margin" not in case else targets)
    wanted = make().double()(outputs, targets)
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    assert task.score().value == pytest.approx(-float(wanted.detach()), rel=1e-6)
    task.check_loss()


def test_pixels_are_counted_where_they_have_a_label() -> None:
    images = torch.randn(6, 1, 3, 3, generator=DRAW, dtype=torch.float64)
    labels = torch.randint(2, (6, 3, 3), generator=DRAW)
    labels[:3, 0] = 255
    model, loss = nn.Conv2d(1, 2, 1).double(), nn.CrossEntropyLoss(ignore_index=255)
    task = Task(model, (images, labels), loss=loss, metric="loss", batch_size=2)
    assert task.score().value == pytest.approx(-float(loss(model(images), labels).detach()))


def test_plain_cross_entropy_of_pairs_is_the_default_loss() -> None:
    task = Task(linear(), (X.float(), Y), loss=nn.CrossEntropyLoss())
    assert task.can_scale_logits
    assert not Task(linear(), (X.float(), Y), loss=nn.CrossEntropyLoss(label_smoothing=0.1)).can_scale_logits


def test_loss_and_metric_are_found_by_one_forward_pass() -> None:
    model = linear().double()
    task = Task(model, (X, NUMBERS), loss=nn.MSELoss(), metric="r2", batch_size=20)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    scores = task.score()
    assert len(calls) == 3
    assert scores.loss == pytest.approx(float(nn.MSELoss()(model(X), NUMBERS).detach()))


def test_the_users_module_stays_as_it_is() -> None:
    loss = nn.CrossEntropyLoss(WEIGHTS)
    Task(linear().double(), (X, Y), loss=loss).check_loss()
    assert loss.reduction == "mean"
    assert loss.weight is not None
    assert loss.weight.dtype == torch.float32


class Weighted(nn.MSELoss):
    pass


REFUSED: list[tuple[Any, Tensor, str]] = [
    (nn.MSELoss(reduction="sum"), NUMBERS, "loss MSELoss: expected reduction='mean', found 'sum'"),
    (nn.KLDivLoss(), SHARES, "loss KLDivLoss: expected reduction='batchmean', found 'mean'"),
    (Weighted(), NUMBERS, "one of torch.nn: MSELoss, .*, found Weighted, which is called with outputs and targets"),
    (nn.CTCLoss(), NUMBERS, "found CTCLoss, which is called with outputs and targets"),
    (functional.mse_loss, NUMBERS, "found mse_loss, which is called with outputs and targets"),
    (
        nn.MSELoss(),
        NUMBERS[:, :2],
        r"expected outputs and targets of one shape, found outputs \(8, 3\) with targets \(8",
    ),
    (
        nn.BCEWithLogitsLoss(weight=torch.ones(60, 3)),
        SHARES,
        r"a weight of shape \(60, 3\), which is that of one batch",
    ),
    (nn.CrossEntropyLoss(WEIGHTS), NUMBERS[:, 0], r"outputs \(8, 3\) with targets \(8,\) float64"),
    (nn.CrossEntropyLoss(WEIGHTS), torch.stack([Y, Y], 1), r"outputs \(8, 3\) with targets \(8, 2\) int64"),
]


@pytest.mark.parametrize(("loss", "targets", "text"), REFUSED)
def test_what_is_not_known_exactly_is_refused(loss: Any, targets: Tensor, text: str) -> None:
    with pytest.raises(TaskError, match=text):
        Task(linear().double(), (X, targets), loss=loss, metric="loss")


def test_data_without_targets_is_refused() -> None:
    with pytest.raises(TaskError, match=r"batch for loss MSELoss: expected \(inputs, targets\), .*, found no labels"):
        Task(linear().double(), X, loss=nn.MSELoss(), metric="loss")


def test_a_soup_is_cooked_with_one() -> None:
    from stockpot import Pool, cook

    pool = Pool.open([{k: v.double() for k, v in linear(seed=s).state_dict().items()} for s in range(3)])
    task = Task(linear().double(), (X, NUMBERS), (X, NUMBERS), loss=nn.MSELoss(), metric="r2", batch_size=20)
    result = cook(pool, task, "crossfit", steps=4, folds=2)
    assert math.isfinite(result.score.value)
