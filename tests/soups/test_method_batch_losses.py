"""Losses that compare the samples of a batch with each other belong to one batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stockpot import Pool, Task, cook
from zoo import fine_tunes, mlp, write


def test_a_contrastive_loss_is_learned_and_judged_at_one_batch_size(tmp_path: Path) -> None:
    """The check on the fold left out used the evaluation's batches, where such a loss is another one."""
    sizes: list[tuple[bool, int]] = []

    def contrastive(model: nn.Module, batch: Any) -> Tensor:
        found = functional.normalize(model(batch[0]), dim=1)
        sizes.append((torch.is_grad_enabled(), len(found)))
        return functional.cross_entropy(found @ found.T * 5, torch.arange(len(found)))

    write(tmp_path / "pool", fine_tunes(mlp, 3))
    x = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
    task = Task(mlp(), (x, x[:, :3].argmax(1)), loss=contrastive, batch_size=64)
    assert not task.loss_adds_up
    cook(Pool.open(tmp_path / "pool"), task, "hl", steps=4, batch_size=16, lr=0.01, folds=2)
    learning = {size for grad, size in sizes if grad}
    judging = {size for grad, size in sizes if not grad}
    assert learning == {8, 16}  # a trial, and the batches
    assert judging >= {16}
    assert not judging & {45, 64 - 45}  # the folds, as the evaluation would cut them
