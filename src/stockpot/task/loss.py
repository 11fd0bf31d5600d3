"""Loss and accuracy of classifiers, per sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from stockpot.errors import TaskError, describe

IGNORED = -100  # PyTorch's ignore_index


def cross_entropy(logits: Tensor, labels: Any, *, label_smoothing: float = 0.0) -> Tensor:
    """Mean over samples, as `torch.nn.functional.cross_entropy` defines it."""
    target = check_pair(logits, labels, "the default loss (cross-entropy)")
    return functional.cross_entropy(logits, target, label_smoothing=label_smoothing)


def sample_losses(logits: Tensor, labels: Any) -> Tensor:
    """Cross-entropy of each sample, (n,); a sample without any label has none and counts as 0."""
    target = check_pair(logits, labels, "cross-entropy per sample")
    losses = functional.cross_entropy(logits, target, reduction="none")  # (n, ...)
    if target.is_floating_point():
        return losses
    return _mean_of_valid(losses, target)


def accuracy(logits: Tensor, labels: Any) -> Tensor:
    """1 or 0 for each sample, (n,); for several positions the share of right ones. Ignored is 0."""
    target = check_pair(logits, labels, 'metric="accuracy"')
    if target.is_floating_point():
        target = target.argmax(1)
    # argmax points at a NaN when there is one, which must not count as an answer.
    right = (logits.argmax(1) == target) & ~logits.isnan().any(1)
    return _mean_of_valid(right.to(logits.dtype), target)


def _mean_of_valid(values: Tensor, target: Tensor) -> Tensor:
    n = values.shape[0]
    valid = (target != IGNORED).to(values.dtype).reshape(n, -1)  # (n, positions)
    return (values.reshape(n, -1) * valid).sum(1) / valid.sum(1).clamp(min=1)


def check_pair(logits: Tensor, labels: Any, purpose: str) -> Tensor:
    """Labels as cross-entropy takes them: class indices, or one probability per class."""
    fix = 'give loss=lambda model, batch: ... and a metric of your own (or metric="loss")'
    if not isinstance(labels, Tensor):
        raise TaskError(
            describe(
                f"batch for {purpose}",
                expected="(inputs, labels), or a dict with one of the keys labels, label, y, target",
                found="no labels" if labels is None else f"labels of type {type(labels).__name__}",
                fix=fix,
            )
        )
    target: Tensor = labels.to(logits.device)
    if labels.is_floating_point():
        fits = logits.ndim == 2 and labels.shape == logits.shape
    else:
        # Three dimensions are refused: (n, T, C) of language models and (n, C, T) look alike.
        fits = logits.ndim in (2, 4, 5) and labels.shape == (logits.shape[0], *logits.shape[2:])
    if not fits:
        raise TaskError(
            describe(
                f"model and labels for {purpose}",
                expected="logits (n, classes) with n integer labels",
                found=f"logits {tuple(logits.shape)} with labels {tuple(labels.shape)} "
                f"{str(labels.dtype).removeprefix('torch.')}",
                fix=fix,
            )
        )
    return target.to(logits.dtype) if target.is_floating_point() else target.long()


def is_pair(logits: Tensor, labels: Any) -> bool:
    """Whether these are a classifier's logits (n, C) with n class labels."""
    return (
        isinstance(labels, Tensor)
        and not labels.is_floating_point()
        and logits.ndim == 2
        and labels.shape == logits.shape[:1]
    )
