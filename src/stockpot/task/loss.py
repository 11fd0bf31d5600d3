"""A loss is a sum and a weight, so that pieces of a batch, ranks and folds add up exactly.

The weight counts samples for a classifier and tokens for a language model. The model's own loss, which Hugging Face
models return for a dict batch, is one mean over a batch; which loss it is per sample is found by trying (`own_form`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stockpot.errors import TaskError
from stockpot.task.batches import at_least_single

IGNORED = -100  # PyTorch's ignore_index

LossFunction = Callable[[nn.Module, Any], Any]


class Loss(NamedTuple):
    """What a batch adds to the objective, which is the sum of all totals over the sum of all weights.

    Scalars, or (n,) for losses of single samples.
    """

    total: Tensor  # with its graph
    weight: Tensor  # without one, on the same device

    @property
    def mean(self) -> Tensor:
        return self.total / self.weight

    def sum(self) -> Loss:
        return Loss(self.total.sum(), self.weight.sum())


def each(losses: Tensor) -> Loss:
    """Samples of equal weight, (n,)."""
    return Loss(losses, torch.ones_like(losses.detach()))


# Cross-entropy ----------------------------------------------------------------------------------------


def sample_losses(logits: Tensor, labels: Any, label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy of each sample, (n,); for several positions summed over those that have a label."""
    target = check_pair(logits, labels, "the default loss (cross-entropy)")
    losses = functional.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)  # (n, ...)
    if losses.ndim == 1:
        return each(losses)
    return Loss(losses.flatten(1).sum(1), (target != IGNORED).flatten(1).sum(1).to(losses.dtype))


OWN = (
    "give the loss that is meant, and a metric that fits. For several labels per sample:"
    " loss=torch.nn.BCEWithLogitsLoss(), metric='micro_f1'; for regression: loss=torch.nn.MSELoss(), metric='r2';"
    " or a function of your own, loss(model, batch), with one loss per sample"
)


def check_pair(logits: Tensor, labels: Any, purpose: str) -> Tensor:
    """Labels as cross-entropy takes them: class indices, or one probability per class."""
    if not isinstance(labels, Tensor):
        raise TaskError.of(
            f"batch for {purpose}",
            expected="(inputs, labels), or a dict with one of the keys labels, label, y, target",
            found="no labels" if labels is None else f"labels of type {type(labels).__name__}",
            fix='give loss=lambda model, batch: ... and a metric of your own (or metric="loss")',
        )
    if not fit_together(logits, labels):
        found = f"logits {tuple(logits.shape)} with labels {tuple(labels.shape)} {labels.dtype}".replace("torch.", "")
        expected = "logits (n, classes) with n integer labels"
        tokens = logits.ndim == 3 and labels.ndim == 2
        fix = 'for models of tokens use metric="nats_per_token", "token_accuracy" or "entity_f1"' if tokens else OWN
        raise TaskError.of(f"model and labels for {purpose}", expected=expected, found=found, fix=fix)
    target: Tensor = labels.to(logits.device)
    return target.to(logits.dtype) if target.is_floating_point() else target.long()


def fit_together(logits: Tensor, labels: Any) -> bool:
    """Whether cross-entropy takes them; their values are looked at elsewhere."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return isinstance(labels, Tensor) and logits.ndim == 2 and labels.shape == logits.shape
    # Three dimensions are refused: (n, T, C) of language models and (n, C, T) look alike.
    return logits.ndim in (2, 4, 5) and labels.shape == (logits.shape[0], *logits.shape[2:])


# A model's own loss -----------------------------------------------------------------------------------

Form = Callable[..., Loss]  # (logits, labels) -> (n,)


def same_tokens(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Loss:
    """Of logits (n, T, C) with labels (n, T): summed over each sequence's labelled tokens, and how many those are."""
    (n, T, C), labels = logits.shape, labels.to(logits.device)
    flat = logits.reshape(n * T, C), labels.reshape(n * T).long()
    losses = functional.cross_entropy(*flat, reduction="none", label_smoothing=label_smoothing)
    return Loss(losses.view(n, T).sum(1), (labels != IGNORED).sum(1).to(losses.dtype))


def next_tokens(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Loss:
    """Position t predicts the label at t + 1, as causal language models are trained."""
    # The last has no next; cutting the logits would copy them.
    return same_tokens(logits, shifted(labels), label_smoothing)


def shifted(labels: Tensor) -> Tensor:
    """The label of the next position at each, (n, T)."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def squared_errors(logits: Tensor, labels: Tensor) -> Loss:
    labels = labels.to(logits.device)
    return each((logits.reshape(len(logits), -1) - labels.reshape(len(labels), -1)).square().mean(1))


def binary_losses(logits: Tensor, labels: Tensor) -> Loss:
    labels = labels.to(logits.device)
    return each(functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1))


def own_form(model: nn.Module, logits: Tensor | None, labels: Any, own: Tensor) -> Form | None:
    """Which loss per sample has the mean that the model computed itself; None if it is none that we know."""
    if logits is None or not isinstance(labels, Tensor):
        return None
    logits, mean = at_least_single(logits.detach()), own.detach().float().mean()
    found: list[tuple[float, Form]] = []
    for form in _candidates(model, logits, labels):
        away = abs(float(form(logits, labels).sum().mean.float() - mean))
        if away <= 1e-5 + 2e-3 * abs(float(mean)):  # the model may have computed it in half precision
            found.append((away, form))
    # An untrained model has nearly the same loss for this token as for the next one, but only one of them exactly.
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _candidates(model: nn.Module, logits: Tensor, labels: Tensor) -> Sequence[Form]:
    if labels.is_floating_point():
        alike = labels.numel() == logits.numel() and len(labels) == len(logits)
        several = labels.shape == logits.shape and logits.ndim == 2
        return [form for form, fits in ((squared_errors, alike), (binary_losses, several)) if fits]
    if labels.ndim == 1 and fit_together(logits, labels):  # one output has no classes to tell apart
        return [squared_errors if logits.shape[1:] == (1,) else sample_losses]
    if logits.ndim == 3 and labels.shape == logits.shape[:2]:
        return [next_tokens, same_tokens] if is_causal(model) else [same_tokens, next_tokens]
    return []


def is_causal(model: nn.Module) -> bool:
    return any(part in type(model).__name__ for part in ("CausalLM", "LMHead"))


def own_loss(mean: Tensor, logits: Tensor | None, labels: Any, rows: int, shift: bool) -> Loss:
    """A model's own mean over a batch with its weight: tokens that have a label, or else samples."""
    mean = at_least_single(mean).mean()  # one loss per replica under DataParallel
    tokens = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim == 2
    if not tokens or logits is None or logits.ndim != 3:
        return Loss(mean * rows, mean.new_full((), rows))
    count = (labels[:, 1:] if shift else labels) != IGNORED
    weight = count.sum().to(mean)
    # The mean of no tokens is NaN; it adds nothing.
    return Loss(torch.where(weight > 0, mean * weight, torch.zeros_like(mean)), weight)


# A loss of the user's own -----------------------------------------------------------------------------


def users_losses(found: Any, rows: int) -> Loss:
    """From a scalar mean, one loss per sample, or a pair (sum, weight), each a scalar or one per sample."""

    def part(value: Any, which: str) -> Tensor:
        if isinstance(value, Tensor) and value.shape in ((), (rows,)):
            return value
        mean = "the mean over the batch, " if which == "loss" else ""
        raise TaskError.of(
            which,
            expected=f"a scalar tensor, {mean}or one per sample, shape ({rows},)",
            found=f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__,
            fix="return one loss per sample, their mean, or a pair (sum, weight) from loss(model, batch)",
        )

    if isinstance(found, (tuple, list)) and len(found) == 2:
        total, weight = at_least_single(part(found[0], "sum of the loss")), found[1]
        if isinstance(weight, (int, float)):
            weight = total.detach().new_full((), weight)
        return Loss(total, part(weight, "weight of the loss").detach().to(total))
    total = at_least_single(part(found, "loss"))
    return each(total) if total.ndim else Loss(total * rows, total.detach().new_full((), rows))


# Losses of torch.nn -----------------------------------------------------------------------------------
#
# Such a module, given as it is (`loss=nn.MSELoss()`), returns one mean of a batch. What it is a mean over (elements,
# samples, or class weights) decides what a batch counts for, so only losses for which that is known are taken, and they
# are computed as sums and weights of each sample. The mean over a whole batch is then exactly the module's own.

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
        mean = "batchmean" if isinstance(loss, nn.KLDivLoss) else "mean"  # torch will change what its "mean" is over
        if loss.reduction != mean:
            fix = f"give reduction={mean!r}; of other reductions it is not known how much a batch counts"
            raise TaskError.of(f"loss {type(loss).__name__}", f"reduction={mean!r}", repr(loss.reduction), fix)
        return
    functional = getattr(loss, "__module__", None) in _FUNCTIONS
    if isinstance(loss, nn.Module) or functional:
        name = getattr(loss, "__name__", "the function") if functional else type(loss).__name__
        known = ", ".join(kind.__name__ for kind in TORCH_LOSSES)
        found = f"{name}, which is called with outputs and targets; what its mean is over is not known"
        raise TaskError.of("loss", f"a function loss(model, batch), or one of torch.nn: {known}", found, _OWN)


class TorchLoss:
    """A loss of torch.nn as sums and weights of the samples of a batch."""

    def __init__(self, loss: Any) -> None:
        self.kind = type(loss)
        self.name = f"loss {self.kind.__name__}"
        self.over_samples = isinstance(loss, (*_SAMPLES, nn.KLDivLoss))
        self.counts_labels = self.kind in _LABELS
        self.each = copy.deepcopy(loss)
        self.each.reduction = "none"

    @classmethod
    def of(cls, loss: Any, batch: Any) -> TorchLoss | None:
        """None for any other loss, and for plain cross-entropy of pairs, which is the default."""
        plain = isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and loss.label_smoothing == 0
        plain = plain and loss.ignore_index == IGNORED and not isinstance(batch, Mapping)
        return cls(loss) if isinstance(loss, nn.Module) and not plain else None

    def __call__(self, outputs: Tensor, targets: Any) -> Loss:
        if not isinstance(targets, Tensor):
            found = "no labels" if targets is None else f"labels of type {type(targets).__name__}"
            expected = "(inputs, targets), or a dict with one of the keys labels, label, y, target"
            raise TaskError.of(f"batch for {self.name}", expected=expected, found=found, fix=_OWN)
        targets = targets.to(outputs.device)
        self.each.to(outputs)  # class weights, like the outputs
        if self.counts_labels:
            return self._of_labels(outputs, targets)
        if self.kind in _ELEMENTS or self.kind is nn.MultiLabelSoftMarginLoss:
            outputs, targets = self._alike(outputs, targets)
        losses: Tensor = self.each(outputs, targets)  # of each element; (n,) where the mean is over samples
        rows = losses.reshape(len(losses), -1)  # (n, elements of a sample)
        if self.over_samples or rows.shape[1] == 1:
            return each(rows.sum(1))
        return Loss(rows.sum(1), losses.new_full((len(rows),), rows.shape[1]))

    def _of_labels(self, outputs: Tensor, targets: Tensor) -> Loss:
        positions = (outputs.shape[0], *outputs.shape[2:])
        shares = targets.is_floating_point() and self.kind is nn.CrossEntropyLoss  # a probability of each class
        whole = shares or not targets.is_floating_point()
        if outputs.ndim < 2 or not whole or targets.shape != (outputs.shape if shares else positions):
            found = f"outputs {tuple(outputs.shape)} with targets {tuple(targets.shape)} {targets.dtype}"
            fix = "check the model's outputs; of tokens (n, T, classes) the default loss is the mean over tokens"
            expected = "outputs (n, classes, ...) with whole numbers (n, ...)"
            raise TaskError.of(self.name, expected=expected, found=found.replace("torch.", ""), fix=fix)
        targets = targets.to(outputs.dtype) if shares else targets.long()
        losses = self.each(outputs, targets)
        weights = losses.new_ones(positions)
        if not shares:
            counted = targets != self.each.ignore_index
            if self.each.weight is not None:
                weights = self.each.weight[targets.where(counted, 0)]
            weights = weights * counted
        return Loss(losses.reshape(len(losses), -1).sum(1), weights.reshape(len(losses), -1).sum(1))

    def _alike(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets of one shape: PyTorch would compare (n, 1) with (n,) as all with all."""
        single = {(len(outputs),), (len(outputs), 1)}
        if outputs.shape != targets.shape and {tuple(outputs.shape), tuple(targets.shape)} == single:
            outputs = outputs.reshape(targets.shape)
        if outputs.shape != targets.shape:
            found = f"outputs {tuple(outputs.shape)} with targets {tuple(targets.shape)}"
            fix = "give the model as many outputs as a sample has targets, or reshape the targets"
            raise TaskError.of(self.name, expected="outputs and targets of one shape", found=found, fix=fix)
        weight = getattr(self.each, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim >= targets.ndim and weight.shape[0] != 1:
            found = f"a weight of shape {tuple(weight.shape)}, which is that of one batch"
            fix = "give weights of samples with the data, and loss=lambda model, batch: (losses * weights, weights)"
            raise TaskError.of(self.name, "a weight of outputs, the same for all samples", found, fix)
        return outputs, targets.to(outputs.dtype)
