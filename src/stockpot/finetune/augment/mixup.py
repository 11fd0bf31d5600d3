"""Mixup: batches averaged with a shuffled copy of themselves, in inputs and in loss."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional

from stockpot.errors import TaskError, describe
from stockpot.finetune.augment.images import back
from stockpot.task import Task
from stockpot.task.batches import find_labels
from stockpot.task.loss import check_pair


def draw_share(alpha: float, seed: int, step: int) -> float:
    """How much of a sample stays itself."""
    return random.Random(f"mixup/{seed}/{step}").betavariate(alpha, alpha)


def shuffle(n: int, stream: Generator, device: torch.device) -> Tensor:
    return torch.randperm(n, generator=stream, device=device)  # (n,)


def mix_inputs(inputs: Tensor, partner: Tensor, share: float) -> Tensor:
    own = inputs.float() if inputs.dtype == torch.uint8 else inputs
    return back(share * own + (1 - share) * own[partner], inputs.dtype)


def mixed_loss(task: Task, batch: Any, partner: Tensor, share: float, label_smoothing: float) -> Tensor:
    """Cross-entropy against both labels of each mixed sample.

    Two losses on one set of logits, not soft labels: models that compute their own loss from float labels
    would take them for another kind of problem.
    """
    logits = task.logits(batch)
    labels = check_pair(logits, find_labels(batch), "mixup")
    if logits.ndim != 2:
        raise TaskError(
            describe(
                "mixup",
                expected="one label per sample",
                found=f"logits {tuple(logits.shape)}",
                fix="leave mixup out",
            )
        )
    one = functional.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    other = functional.cross_entropy(logits, labels[partner], label_smoothing=label_smoothing)
    return share * one + (1 - share) * other
