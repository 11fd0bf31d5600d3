"""Losses of torch.nn, given as they are: `loss=nn.MSELoss()`.

Such a module returns one mean of a batch. What it is a mean over (elements, samples, or class weights) decides what a
batch counts for, so only losses for which that is known are taken, and they are computed as sums and weights of each
sample. The mean over a whole batch is then exactly the module's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from stockpot.errors import TaskError
from stockpot.task.batches import call, find_labels, models_code, need_logits
from stockpot.task.loss import IGNORED, LossFunction

# What their mean is a mean over.
_ELEMENTS = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss,
    nn.KLDivLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss,
)  # fmt: skip
_LABELS = (nn.CrossEntropyLoss, nn.NLLLoss)  # each label counts as its class does
_SAMPLES = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
TORCH_LOSSES = (*_ELEMENTS, *_LABELS, *_SAMPLES)
_OWN = (
    "give loss=lambda model, batch: your_loss(model(batch[0]), batch[1]) with one loss per sample, as reduction='none'"
    " gives it"
)
_FUNCTIONS = ("torch.nn.functional", "torch._C._nn")


def check_torch_loss(loss: Any) -> None:
    """Refuse modules and functions of (outputs, targets) whose mean is a mean over who knows what."""
    if type(loss) in TORCH_LOSSES:
        _check_settings(loss)
        return
    functional = getattr(loss, "__module__", None) in _FUNCTIONS
    if isinstance(loss, nn.Module) or functional:
        name = getattr(loss, "__name__", "the function") if functional else type(loss).__name__
        known = ", ".join(kind.__name__ for kind in TORCH_LOSSES)
        found = f"{name}, which is called with outputs and targets; what its mean is over is not known"
        expected = f"a function loss(model, batch), or one of torch.nn: {known}"
        raise TaskError.of("loss", expected=expected, found=found, fix=_OWN)


def _check_settings(loss: Any) -> None:
    mean = "batchmean" if isinstance(loss, nn.KLDivLoss) else "mean"  # torch will change what its "mean" is over
    if loss.reduction != mean:
        fix = f"give reduction={mean!r}; of other reductions it is not known how much a batch counts"
        expected = f"reduction={mean!r}"
        raise TaskError.of(f"loss {type(loss).__name__}", expected=expected, found=repr(loss.reduction), fix=fix)


def as_function(loss: LossFunction | nn.Module | None, batch: Any) -> LossFunction | None:
    """The loss as a function of model and batch. Of pairs, plain cross-entropy is the default loss, which is None."""
    if not isinstance(loss, nn.Module):
        return loss
    plain = isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and loss.label_smoothing == 0
    if plain and loss.ignore_index == IGNORED and not isinstance(batch, Mapping):
        return None
    return TorchLoss(loss)


class TorchLoss:
    """A loss of torch.nn as sums and weights of the samples of a batch."""

    def __init__(self, loss: Any) -> None:
        self.kind = type(loss)
        self.over_samples = isinstance(loss, (*_SAMPLES, nn.KLDivLoss))
        self.each = copy.deepcopy(loss)
        self.each.reduction = "none"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        name = f"loss {self.kind.__name__}"
        with models_code(model, batch):
            outputs = need_logits(call(model, batch), name)
        targets = find_labels(batch)
        if not isinstance(targets, Tensor):
            found = "no labels" if targets is None else f"labels of type {type(targets).__name__}"
            expected = "(inputs, targets), or a dict with one of the keys labels, label, y, target"
            raise TaskError.of(f"batch for {name}", expected=expected, found=found, fix=_OWN)
        targets = targets.to(outputs.device)
        self.each.to(outputs)  # class weights, like the outputs
        if self.kind in _LABELS:
            return self._of_labels(name, outputs, targets)
        if self.kind in _ELEMENTS or self.kind is nn.MultiLabelSoftMarginLoss:
            outputs, targets = self._alike(name, outputs, targets)
        losses: Tensor = self.each(outputs, targets)  # of each element; (n,) where the mean is over samples
        rows = losses.reshape(len(losses), -1)  # (n, elements of a sample)
        if self.over_samples or rows.shape[1] == 1:
            return rows.sum(1)
        return rows.sum(1), losses.new_full((len(rows),), rows.shape[1])

    def _of_labels(self, name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        positions = (outputs.shape[0], *outputs.shape[2:])
        shares = targets.is_floating_point() and self.kind is nn.CrossEntropyLoss  # a probability of each class
        whole = shares or not targets.is_floating_point()
        if outputs.ndim < 2 or not whole or targets.shape != (outputs.shape if shares else positions):
            found = f"outputs {tuple(outputs.shape)} with targets {tuple(targets.shape)} {targets.dtype}"
            fix = "check the model's outputs; of tokens (n, T, classes) the default loss is the mean over tokens"
            expected = "outputs (n, classes, ...) with whole numbers (n, ...)"
            raise TaskError.of(name, expected=expected, found=found.replace("torch.", ""), fix=fix)
        targets = targets.to(outputs.dtype) if shares else targets.long()
        losses = self.each(outputs, targets)
        weights = losses.new_ones(positions)
        if not shares:
            counted = targets != self.each.ignore_index
            if self.each.weight is not None:
                weights = self.each.weight[targets.where(counted, 0)]
            weights = weights * counted
        return losses.reshape(len(losses), -1).sum(1), weights.reshape(len(losses), -1).sum(1)

    def _alike(self, name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets of one shape: PyTorch would compare (n, 1) with (n,) as all with all."""
        single = {(len(outputs),), (len(outputs), 1)}
        if outputs.shape != targets.shape and {tuple(outputs.shape), tuple(targets.shape)} == single:
            outputs = outputs.reshape(targets.shape)
        if outputs.shape != targets.shape:
            found = f"outputs {tuple(outputs.shape)} with targets {tuple(targets.shape)}"
            fix = "give the model as many outputs as a sample has targets, or reshape the targets"
            raise TaskError.of(name, expected="outputs and targets of one shape", found=found, fix=fix)
        weight = getattr(self.each, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim >= targets.ndim and weight.shape[0] != 1:
            found = f"a weight of shape {tuple(weight.shape)}, which is that of one batch"
            fix = "give weights of samples with the data, and loss=lambda model, batch: (losses * weights, weights)"
            raise TaskError.of(name, expected="a weight of outputs, the same for all samples", found=found, fix=fix)
        return outputs, targets.to(outputs.dtype)
