"""A metric is statistics per sample and a reduction of all of them to one number; higher is better."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stockpot.errors import TaskError, describe
from stockpot.task.batches import find_labels, need_logits
from stockpot.task.loss import SampleLosses, check_pair, mean_of_valid, sample_losses

MetricFunction = Callable[[Any, Any], Any]


def mean(table: Tensor) -> float:
    return float(table[:, 0].mean())


@dataclass(frozen=True)
class Metric:
    """How good outputs are: `statistics(outputs, batch)` for each sample, `reduce(table)` over all samples.

    A mean has one statistic, the sample's score; its `ceiling`, the largest score of one sample, lets greedy stop an
    evaluation early. `resampled(table (N, m), counts (B, N)) -> (B,)` is the same reduction with each sample counted
    so often; it only makes intervals faster, where reducing a thousand times would be slow.
    """

    name: str
    statistics: Callable[[Any, Any], Tensor]  # -> (n, m)
    reduce: Callable[[Tensor], float] = mean  # (N, m) float64 on the host
    is_mean: bool = False
    ceiling: float | None = None
    percent: bool = False
    resampled: Callable[[Tensor, Tensor], Tensor] | None = None


def as_metric(metric: str | Metric | MetricFunction) -> Metric:
    """What a task was given, as a `Metric`."""
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        return METRICS[metric]
    return Metric("score", _Scores(metric), is_mean=True)


@dataclass(frozen=True)
class _Scores:
    """A plain function metric(outputs, batch) with one score per sample, as statistics."""

    function: MetricFunction

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        values = torch.as_tensor(self.function(outputs, batch)).detach()
        if values.ndim == 0:
            values = values[None]  # right for one sample only
        if values.ndim != 1:
            raise TaskError(
                describe(
                    "metric",
                    expected="one score per sample, shape (n,)",
                    found=f"shape {tuple(values.shape)}",
                    fix=HOW_TO,
                )
            )
        return values[:, None]


HOW_TO = (
    "return one number per sample from metric(outputs, batch). What is no mean over samples (F1, AUC) is a Metric:"
    ' Metric("name", statistics=lambda outputs, batch: ..., reduce=lambda table: ...), statistics (n, m) for each'
    " sample and one number from the table (N, m) of all samples"
)


def check_statistics(values: Any, n: int) -> Tensor:
    """Statistics (n, m) as they come from a metric; (n,) is one statistic."""
    found = torch.as_tensor(values).detach()
    if found.ndim == 1 and len(found) == n:
        found = found[:, None]
    if found.ndim != 2 or len(found) != n or found.shape[1] == 0:
        shown = "one number for the whole batch" if found.numel() == 1 else f"shape {tuple(found.shape)}"
        raise TaskError(
            describe("metric", expected=f"one score per sample, shape ({n},)", found=shown, fix=HOW_TO)
        )
    return found


# Classes ----------------------------------------------------------------------------------------------


def _accuracy(outputs: Any, batch: Any) -> Tensor:
    """1 or 0 for each sample, (n, 1); for several positions the share of right ones. Ignored is 0."""
    purpose = 'metric="accuracy"'
    logits = need_logits(outputs, purpose)
    target = check_pair(logits, find_labels(batch), purpose)
    if target.is_floating_point():
        target = target.argmax(1)
    # argmax points at a NaN when there is one, which must not count as an answer.
    right = (logits.argmax(1) == target) & ~logits.isnan().any(1)
    return mean_of_valid(right.to(logits.dtype), target)[:, None]


def _classes(name: str) -> Callable[[Any, Any], Tensor]:
    """(predicted, label) of each sample; a prediction of NaN is class -1, which is never right."""

    def statistics(outputs: Any, batch: Any) -> Tensor:
        logits = need_logits(outputs, f'metric="{name}"')
        target = check_pair(logits, find_labels(batch), f'metric="{name}"')
        if logits.ndim != 2:
            raise _unfit(name, "one label per sample", f"logits {tuple(logits.shape)}")
        if target.is_floating_point():
            target = target.argmax(1)
        predicted = torch.where(logits.isnan().any(1), -1, logits.argmax(1))
        return torch.stack([predicted, target], dim=1)

    return statistics


def _counts(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each class: how often it was predicted and right, predicted, and the label. (C,) each"""
    predicted, label = (table.long() + 1).unbind(1)  # class -1 becomes 0
    size = int(table.max()) + 2
    right = torch.bincount(label[predicted == label], minlength=size)
    both = (torch.bincount(column, minlength=size) for column in (predicted, label))
    return (right[1:].double(), *(count[1:].double() for count in both))  # type: ignore[return-value]


def _macro_f1(table: Tensor) -> float:
    """The mean over all classes that are predicted or labels, as scikit-learn has it."""
    right, predicted, label = _counts(table)
    seen = (predicted + label) > 0
    return float((2 * right[seen] / (predicted + label)[seen]).mean())


def _micro_f1(table: Tensor) -> float:
    right, _, label = _counts(table)
    return float(right.sum() / label.sum())  # every sample has one prediction, so precision is recall


def _balanced_accuracy(table: Tensor) -> float:
    """The mean recall of the classes that occur among the labels."""
    right, _, label = _counts(table)
    seen = label > 0
    return float((right[seen] / label[seen]).mean())


def _binary(outputs: Any, batch: Any) -> Tensor:
    """(score of class 1, label) of each sample."""
    name = "roc_auc"
    logits, labels = need_logits(outputs, f'metric="{name}"'), find_labels(batch)
    if logits.ndim == 2 and logits.shape[1] == 2:
        score = logits[:, 1] - logits[:, 0]  # in the order of the probability, without its ties near 0 and 1
    else:
        score = logits.reshape(-1)
    if not isinstance(labels, Tensor) or labels.numel() != len(score) or len(score) != len(logits):
        shape = tuple(labels.shape) if isinstance(labels, Tensor) else None
        raise _unfit(
            name,
            "one score or two logits, and one label, per sample",
            f"{tuple(logits.shape)}, labels {shape}",
        )
    return torch.stack([score, labels.reshape(-1).to(score)], dim=1)


def _auc(table: Tensor, counts: Tensor) -> Tensor:
    """How often a sample of class 1 has the higher score, ties half; NaN where only one class is. (B,)"""
    order = table[:, 0].argsort()
    counts = counts[:, order]
    positive = counts * table[order, 1]  # (B, N)
    negative = counts - positive
    _, group = torch.unique_consecutive(table[order, 0], return_inverse=True)  # (N,) equal scores
    size = (len(counts), int(group[-1]) + 1)
    above = torch.zeros(size, dtype=table.dtype).index_add_(1, group, positive)
    below = torch.zeros(size, dtype=table.dtype).index_add_(1, group, negative)
    wins = (above * (below.cumsum(1) - below / 2)).sum(1)
    return wins / (positive.sum(1) * negative.sum(1))


# Numbers ----------------------------------------------------------------------------------------------


def _values(name: str) -> Callable[[Any, Any], Tensor]:
    """Predictions and targets side by side, (n, 2D), for outputs and float targets (n,) or (n, D)."""

    def statistics(outputs: Any, batch: Any) -> Tensor:
        found, labels = need_logits(outputs, f'metric="{name}"'), find_labels(batch)
        if not isinstance(labels, Tensor) or not labels.is_floating_point():
            kind = str(labels.dtype).removeprefix("torch.") if isinstance(labels, Tensor) else "no"
            raise _unfit(
                name,
                "float targets",
                f"{kind} labels",
                "give measurements as float tensors, such as y.float()",
            )
        n = len(found)
        if len(labels) != n or labels.numel() != found.numel():
            shapes = f"outputs {tuple(found.shape)} with targets {tuple(labels.shape)}"
            raise _unfit(name, "one output for each target", shapes)
        return torch.cat([found.reshape(n, -1), labels.to(found).reshape(n, -1)], dim=1)

    return statistics


def _errors(name: str, power: int) -> Callable[[Any, Any], Tensor]:
    values = _values(name)

    def statistics(outputs: Any, batch: Any) -> Tensor:
        found, target = values(outputs, batch).chunk(2, dim=1)
        return -(found - target).abs().pow(power).mean(1, keepdim=True)

    return statistics


def _r2(table: Tensor) -> float:
    """Mean over outputs. For targets that are all the same: 1 if every one is met, else 0, as in scikit-learn."""
    found, target = table.chunk(2, dim=1)  # (N, D)
    left = (target - found).square().sum(0)
    spread = (target - target.mean(0)).square().sum(0)
    constant = torch.where(left == 0, 1.0, 0.0).double()
    constant[left.isnan()] = math.nan
    return float(torch.where(_is_flat(spread, target.T), constant, 1 - left / spread).mean())


def _correlation(found: Tensor, target: Tensor, counts: Tensor) -> Tensor:
    """Pearson's for (B, N) values counted so often: 0 for constant predictions, NaN for constant targets."""
    n = counts.sum(1, keepdim=True)
    x, y = (values - (counts * values).sum(1, keepdim=True) / n for values in (found, target))
    cx, cy = counts * x, counts * y
    xx, yy = (cx * x).sum(1), (cy * y).sum(1)
    r = ((cx * y).sum(1) / (xx * yy).sqrt()).clamp(-1, 1)
    r = torch.where(_is_flat(xx, found), torch.zeros_like(r), r)
    return torch.where(_is_flat(yy, target), torch.full_like(r, math.nan), r)


def _is_flat(spread: Tensor, values: Tensor) -> Tensor:
    """Whether a sum of squares about the mean, (B,) of values (B, N), is what rounding leaves of a constant."""
    return spread <= 1e-28 * values.shape[1] * values.abs().amax(1).square()


def _pearson(table: Tensor, counts: Tensor) -> Tensor:
    found, target = table.T.chunk(2)  # (D, N)
    each = [
        _correlation(f.expand_as(counts), t.expand_as(counts), counts)
        for f, t in zip(found, target, strict=True)
    ]
    return torch.stack(each).mean(0)


def _spearman(table: Tensor, counts: Tensor) -> Tensor:
    found, target = table.T.chunk(2)  # (D, N)
    each = [
        _correlation(_ranks(f, counts), _ranks(t, counts), counts) for f, t in zip(found, target, strict=True)
    ]
    return torch.stack(each).mean(0)


def _ranks(values: Tensor, counts: Tensor) -> Tensor:
    """The middle rank of each value among all, each counted so often. (N,), (B, N) -> (B, N)"""
    if bool(values.isnan().any()):
        return torch.full_like(counts, math.nan)
    _, group, sizes = torch.unique(values, return_inverse=True, return_counts=True)
    totals = counts
    if len(sizes) < len(values):
        totals = torch.zeros(len(counts), len(sizes), dtype=counts.dtype).index_add_(1, group, counts)
    else:
        totals = counts[:, group.argsort()]
    return (totals.cumsum(1) - totals / 2)[:, group]


def _once(resampled: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], float]:
    def reduce(table: Tensor) -> float:
        if bool(table.isnan().any()):
            return math.nan
        return float(resampled(table, torch.ones(1, len(table), dtype=table.dtype)))

    return reduce


# Losses -----------------------------------------------------------------------------------------------


def loss_statistics(metric: Metric, losses: SampleLosses) -> Tensor:
    """What `loss` and `perplexity` keep of each sample: its score, or its summed loss and weight."""
    if metric.is_mean:
        return -losses.totals[:, None]
    return torch.stack([losses.totals, losses.weights.to(losses.totals)], dim=1)


def _default_losses(outputs: Any, batch: Any, purpose: str) -> SampleLosses:
    return sample_losses(need_logits(outputs, purpose), find_labels(batch))


def _loss(outputs: Any, batch: Any) -> Tensor:
    return -_default_losses(outputs, batch, 'metric="loss"').totals[:, None]


def _loss_and_weight(outputs: Any, batch: Any) -> Tensor:
    return torch.stack(_default_losses(outputs, batch, 'metric="perplexity"'), dim=1)


def _negative_ratio(table: Tensor) -> float:
    total, weight = table.sum(0).tolist()
    return -total / weight if weight else math.nan


def _perplexity(table: Tensor) -> float:
    nats = -_negative_ratio(table)
    return -math.exp(nats) if nats < 700 else (-math.inf if nats == nats else math.nan)


def _unfit(name: str, expected: str, found: str, fix: str = "use a metric that fits the task") -> TaskError:
    return TaskError(describe(f'metric="{name}"', expected=expected, found=found, fix=fix))


# "loss" where samples have weights of their own, such as their tokens. A task takes it by itself.
WEIGHTED_LOSS = Metric("loss", _loss_and_weight, _negative_ratio)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", _accuracy, is_mean=True, ceiling=1.0, percent=True),
        Metric("loss", _loss, is_mean=True),
        Metric("perplexity", _loss_and_weight, _perplexity),
        Metric("macro_f1", _classes("macro_f1"), _macro_f1, percent=True),
        Metric("micro_f1", _classes("micro_f1"), _micro_f1, percent=True),
        Metric("balanced_accuracy", _classes("balanced_accuracy"), _balanced_accuracy, percent=True),
        Metric("r2", _values("r2"), _r2),
        Metric("negative_mse", _errors("negative_mse", 2), is_mean=True),
        Metric("negative_mae", _errors("negative_mae", 1), is_mean=True),
        Metric("pearson", _values("pearson"), _once(_pearson)),
        Metric("spearman", _values("spearman"), _once(_spearman), resampled=_spearman),
        Metric("roc_auc", _binary, _once(_auc), resampled=_auc),
    )
}
LOSSES = (METRICS["loss"], WEIGHTED_LOSS, METRICS["perplexity"])  # what a task computes by its own loss
