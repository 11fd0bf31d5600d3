"""What a first few samples tell before any long work starts: which loss and metric these are, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.errors import TaskError
from stockpot.task.batches import batch_rows, find_labels, find_logits, find_loss, need_logits, with_blank_labels
from stockpot.task.checks import check_targets, has_several_labels
from stockpot.task.data import Data
from stockpot.task.judge import Judge
from stockpot.task.loss import Loss, check_pair, fit_together, next_tokens, own_form, same_tokens, sample_losses
from stockpot.task.metrics import LOSSES, METRICS, MULTI_LABEL, WEIGHTED_LOSS

SMALL = 8  # samples of a trial batch


def try_batch(judge: Judge, data: Data, batch: Any, *, first: bool) -> bool:
    """Refuse labels outside the model's classes, and a model that cannot be called or judged on this batch of the data.

    The first data also decides which form of the loss and the metric is meant. Gives whether the loss can be computed
    with the logits times a factor.
    """
    default = judge.users_loss is None
    try:
        outputs = judge.call(with_blank_labels(batch))
    except Exception as error:
        if not default and judge.metric in LOSSES:  # the user's loss knows how to call this model
            _learn_form(judge, batch)
            return False
        if isinstance(error, TaskError):
            raise
        raise TaskError.of(
            f"model {type(judge.model).__name__}",
            expected=f"a model that can be called on a batch of the {data.name}",
            found=f"{type(error).__name__}: {error}",
            fix="make batches (inputs, labels) or dicts of keyword arguments; or give loss=lambda model, batch:"
            ' ... with one loss per sample and metric="loss"',
        ) from error
    logits = find_logits(outputs)
    if first and judge.metric == METRICS.get(judge.metric.name) and has_several_labels(data.targets, logits):
        judge.metric = MULTI_LABEL.get(judge.metric.name, judge.metric)
    accuracy = judge.metric == METRICS["accuracy"]
    if default and accuracy:
        check_pair(need_logits(outputs, 'metric="accuracy"'), find_labels(batch), 'metric="accuracy"')
    own = isinstance(batch, Mapping) and find_loss(outputs) is not None
    check_targets(data, logits, judge.metric, loss=default, own=own)
    if first:
        _learn_form(judge, batch)
        if default and not own and judge.metric == METRICS["loss"] and logits is not None and logits.ndim > 2:
            judge.metric = WEIGHTED_LOSS  # several positions in each sample
    if default or not accuracy:
        judge.statistics(batch, batch_rows(batch), with_loss=False)
    return first and _scales(judge, logits, find_labels(batch))


def _learn_form(judge: Judge, batch: Any) -> None:
    """See which loss the model computes itself, and whether samples have weights of their own."""
    weighted = False
    if judge.users_loss is not None:
        if judge.metric in LOSSES:
            weighted = isinstance(judge.call_users_loss(batch), (tuple, list))
            judge.users_sample_losses(batch, batch_rows(batch))
    elif isinstance(batch, Mapping):
        outputs = judge.call(batch)
        own = find_loss(outputs)
        judge.has_own_loss = own is not None
        if own is not None:
            judge.form = own_form(judge.model, find_logits(outputs), find_labels(batch), own)
            weighted = judge.form in (next_tokens, same_tokens)
    if weighted and judge.metric == METRICS["loss"]:
        judge.metric = WEIGHTED_LOSS


def _scales(judge: Judge, logits: Tensor | None, labels: Any) -> bool:
    if judge.users_loss is not None or logits is None or not isinstance(labels, Tensor):
        return False
    if judge.has_own_loss and judge.form is not None:
        return judge.form in (sample_losses, next_tokens, same_tokens)
    return fit_together(logits, labels)


def adds_up(loss: Callable[[Tensor], Loss], n: int, reseed: Callable[[int], None]) -> bool:
    """Whether the loss of a few samples is that of two pieces of them together."""
    rows = torch.arange(min(SMALL, n))

    def mean(seed: int, *pieces: Tensor) -> Tensor:
        reseed(seed)
        parts = [loss(piece) for piece in pieces if len(piece)]
        return torch.stack([part.total for part in parts]).sum() / torch.stack([part.weight for part in parts]).sum()

    third = len(rows) // 3
    whole, again, cut = mean(0, rows), mean(1, rows), mean(0, rows[:third], rows[third:])
    if not torch.isclose(whole, again, rtol=1e-3, equal_nan=True):
        return True  # it draws numbers of its own, so nothing can be seen
    return bool(torch.isclose(whole, cut, rtol=5e-3, atol=1e-5, equal_nan=True))


# The loss --------------------------------------------------------------------------------------------


def check_start(model: nn.Module, losses: list[Callable[[], Loss]]) -> None:
    """The loss must be a finite number with a gradient; later ones are tried if the first has none."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    flags = [p.requires_grad for p in parameters]
    try:
        # Freezing during fine-tuning says nothing about mixing, so frozen parameters count here.
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            reached = any(_has_gradient(compute, parameters) for compute in losses)
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
    if not reached:
        raise _ignores_model("every parameter's gradient is None or exactly zero")


def _has_gradient(compute: Callable[[], Loss], parameters: list[nn.Parameter]) -> bool:
    loss = compute().mean
    value = float(loss.detach())
    if not torch.isfinite(loss.detach()):
        raise TaskError.of(
            "loss at the start",
            expected="a finite number",
            found=str(value),
            fix="check the checkpoints for NaN or Inf, the data, and the autocast dtype",
        )
    if loss.grad_fn is None:
        raise _ignores_model("the loss has no gradient function")
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return any(g is not None and bool(g.any()) for g in gradients)


def _ignores_model(found: str) -> TaskError:
    return TaskError.of(
        "loss",
        expected="a value that depends on the model's parameters",
        found=found,
        fix="call the given model inside loss(model, batch), without torch.no_grad() or .detach()",
    )
