"""The built-in metrics, as scikit-learn and scipy define them; losses and errors are negated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stockpot.errors import TaskError
from stockpot.task.batches import find_labels, need_logits
from stockpot.task.intervals import Counted
from stockpot.task.loss import SampleLosses, check_pair, mean_of_valid, sample_losses
from stockpot.task.scores import Metric, MetricFunction

Statistics = Callable[[Any, Any], Tensor]


def as_metric(metric: str | Metric | MetricFunction) -> Metric:
    """What a task was given, as a `Metric`."""
    if isinstance(metric, Metric):
        return metric
    return METRICS[metric] if isinstance(metric, str) else Metric.of_function(metric)


def _metric(name: str, statistics: Statistics, counted: Callable[[Tensor], Counted], percent: bool = False) -> Metric:
    """A metric whose value is that of all samples counted once."""

    def reduce(table: Tensor) -> float:
        if bool(table.isnan().any()):
            return math.nan
        return float(counted(table)(torch.ones(1, len(table), dtype=table.dtype)))

    return Metric(name, statistics, reduce, percent=percent, counted=counted)


def _unfit(name: str, expected: str, found: str, fix: str = "use a metric that fits the task") -> TaskError:
    return TaskError.of(f'metric="{name}"', expected=expected, found=found, fix=fix)


# One class per sample ---------------------------------------------------------------------------------


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


def _classes(name: str) -> Statistics:
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


def _by_class(value: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor], Counted]:
    """From how often each class was right, predicted and the label, (B, C) each, to values (B,)."""

    def counted(table: Tensor) -> Counted:
        predicted, label = (table.long() + 1).unbind(1)  # class -1 becomes 0
        right = (predicted == label).to(table.dtype)
        size = int(table.max()) + 2

        def values(counts: Tensor) -> Tensor:
            def per_class(classes: Tensor, counts: Tensor) -> Tensor:
                return counts.new_zeros(len(counts), size).index_add_(1, classes, counts)[:, 1:]

            return value(per_class(label, counts * right), per_class(predicted, counts), per_class(label, counts))

        return values

    return counted


def _mean_over(seen: Tensor, shares: Tensor) -> Tensor:
    """Of (B, C), over the classes that are seen."""
    return torch.where(seen, shares, 0).sum(1) / seen.sum(1)


def _macro_f1(right: Tensor, predicted: Tensor, label: Tensor) -> Tensor:
    """The mean over all classes that are predicted or labels."""
    return _mean_over(predicted + label > 0, 2 * right / (predicted + label))


def _balanced_accuracy(right: Tensor, predicted: Tensor, label: Tensor) -> Tensor:  # noqa: ARG001 (one shape for all)
    """The mean recall of the classes that occur among the labels."""
    return _mean_over(label > 0, right / label)


def _micro_f1(right: Tensor, predicted: Tensor, label: Tensor) -> Tensor:  # noqa: ARG001
    return right.sum(1) / label.sum(1)  # every sample has one prediction, so precision is recall


# Several labels per sample ----------------------------------------------------------------------------


def _hits(name: str) -> Statistics:
    """True positives, false positives and misses of each label, (n, 3C); a logit above 0 says yes, NaN is a miss."""

    def statistics(outputs: Any, batch: Any) -> Tensor:
        logits, labels = need_logits(outputs, f'metric="{name}"'), find_labels(batch)
        if not isinstance(labels, Tensor) or labels.shape != logits.shape:
            shape = tuple(labels.shape) if isinstance(labels, Tensor) else None
            raise _unfit(name, "a logit for each label", f"logits {tuple(logits.shape)}, labels {shape}")
        yes, label = logits > 0, labels.to(logits.device) > 0
        return torch.cat([yes & label, yes & ~label, ~yes & label], dim=1).to(logits.dtype)

    return statistics


def _f1_of_hits(micro: bool) -> Callable[[Tensor], Counted]:
    """Of all labels together, or their mean; 0 for one that neither occurs nor is predicted, as scikit-learn has it."""

    def counted(table: Tensor) -> Counted:
        def values(counts: Tensor) -> Tensor:
            sums = (counts @ table).reshape(len(counts), 3, -1)  # (B, 3, C)
            hit, false, missed = (sums.sum(2, keepdim=True) if micro else sums).unbind(1)
            return (2 * hit / (2 * hit + false + missed)).nan_to_num(0.0).mean(1)

        return values

    return counted


# Scores and ranks -------------------------------------------------------------------------------------


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
        found = f"{tuple(logits.shape)}, labels {shape}"
        raise _unfit(name, "one score or two logits, and one label, per sample", found)
    return torch.stack([score, labels.reshape(-1).to(score)], dim=1)


def _auc(table: Tensor) -> Counted:
    """How often a sample of class 1 has the higher score, ties half; NaN where only one class is."""
    _, group = torch.unique(table[:, 0], return_inverse=True)  # (N,) equal scores, in their order
    label, size = table[:, 1], int(group.max()) + 1

    def values(counts: Tensor) -> Tensor:
        positive = counts * label  # (B, N)
        above = counts.new_zeros(len(counts), size).index_add_(1, group, positive)
        below = counts.new_zeros(len(counts), size).index_add_(1, group, counts - positive)
        wins = (above * (below.cumsum(1) - below / 2)).sum(1)
        return wins / (above.sum(1) * below.sum(1))

    return values


def _middle_ranks(values: Tensor) -> Counted:
    """The rank of each value among all that were drawn, about the middle one; ties share theirs. -> (B, N)"""
    _, group = torch.unique(values, return_inverse=True)
    size = int(group.max()) + 1

    def ranks(counts: Tensor) -> Tensor:
        totals = counts.new_zeros(len(counts), size).index_add_(1, group, counts)
        return (totals.cumsum(1) - totals / 2 - counts.sum(1, keepdim=True) / 2)[:, group]

    return ranks


def _spearman(table: Tensor) -> Counted:
    found, target = table.T.chunk(2)  # (D, N)
    rankings = [(_middle_ranks(f), _middle_ranks(t)) for f, t in zip(found, target, strict=True)]

    def values(counts: Tensor) -> Tensor:
        each = []
        for one, other in rankings:
            x, y = one(counts), other(counts)  # (B, N) with a mean of zero
            cx = counts * x
            each.append(_correlation((cx * x).sum(1), (cx * y).sum(1), (counts * y * y).sum(1)))
        return torch.stack(each).mean(0)

    return values


# Numbers ----------------------------------------------------------------------------------------------


def _values(name: str) -> Statistics:
    """Predictions and targets side by side, (n, 2D), for outputs and float targets (n,) or (n, D)."""

    def statistics(outputs: Any, batch: Any) -> Tensor:
        found, labels = need_logits(outputs, f'metric="{name}"'), find_labels(batch)
        if not isinstance(labels, Tensor) or not labels.is_floating_point():
            kind = str(labels.dtype).removeprefix("torch.") if isinstance(labels, Tensor) else "no"
            fix = "give measurements as float tensors, such as y.float()"
            raise _unfit(name, "float targets", f"{kind} labels", fix)
        n = len(found)
        if len(labels) != n or labels.numel() != found.numel():
            shapes = f"outputs {tuple(found.shape)} with targets {tuple(labels.shape)}"
            raise _unfit(name, "one output for each target", shapes)
        return torch.cat([found.reshape(n, -1), labels.to(found).reshape(n, -1)], dim=1)

    return statistics


def _errors(name: str, power: int) -> Statistics:
    values = _values(name)

    def statistics(outputs: Any, batch: Any) -> Tensor:
        found, target = values(outputs, batch).chunk(2, dim=1)
        return -(found - target).abs().pow(power).mean(1, keepdim=True)

    return statistics


def _spread(sums: Tensor, squares: Tensor, n: Tensor) -> Tensor:
    """The sum of squares about the mean; zero where it is what rounding leaves of a constant."""
    found = squares - sums.square() / n
    return torch.where(found <= 1e-13 * squares, 0, found)


def _centred(values: Tensor) -> Tensor:
    """(N, D) about its mean; a constant is exactly zero."""
    return torch.where((values == values[0]).all(0), 0, values - values.mean(0))


def _r2(table: Tensor) -> Counted:
    """Mean over outputs. For targets that are all the same: 1 if every one is met, else 0, as in scikit-learn."""
    found, target = table.chunk(2, dim=1)  # (N, D)
    centred = _centred(target)
    moments = torch.cat([(target - found).square(), centred, centred.square()], dim=1)  # (N, 3D)

    def values(counts: Tensor) -> Tensor:
        left, sums, squares = (counts @ moments).chunk(3, dim=1)  # (B, D)
        spread = _spread(sums, squares, counts.sum(1, keepdim=True))
        return torch.where(spread == 0, (left == 0).to(left), 1 - left / spread).mean(1)

    return values


def _pearson(table: Tensor) -> Counted:
    x, y = (_centred(part) for part in table.chunk(2, dim=1))  # (N, D)
    moments = torch.cat([x, y, x * x, x * y, y * y], dim=1)

    def values(counts: Tensor) -> Tensor:
        x, y, xx, xy, yy = (counts @ moments).chunk(5, dim=1)  # (B, D)
        n = counts.sum(1, keepdim=True)
        return _correlation(_spread(x, xx, n), xy - x * y / n, _spread(y, yy, n)).mean(1)

    return values


def _correlation(xx: Tensor, xy: Tensor, yy: Tensor) -> Tensor:
    """From sums of products about the means: 0 for constant predictions, NaN for constant targets."""
    r = torch.where(xx == 0, 0, (xy / (xx * yy).sqrt()).clamp(-1, 1))
    return torch.where(yy == 0, math.nan, r)


# Losses -----------------------------------------------------------------------------------------------


def loss_statistics(metric: Metric, losses: SampleLosses) -> Tensor:
    """What `loss` and `perplexity` keep of each sample: minus its loss, or its summed loss and weight."""
    if metric.is_mean:
        return -losses.totals[:, None]
    return torch.stack([losses.totals, losses.weights.to(losses.totals)], dim=1)


def _losses(name: str) -> Statistics:
    def statistics(outputs: Any, batch: Any) -> Tensor:
        logits = need_logits(outputs, f'metric="{name}"')
        return loss_statistics(METRICS[name], sample_losses(logits, find_labels(batch)))

    return statistics


def _negative_ratio(table: Tensor) -> Counted:
    def values(counts: Tensor) -> Tensor:
        total, weight = (counts @ table).unbind(1)
        return -total / weight

    return values


def _perplexity(table: Tensor) -> Counted:
    ratio = _negative_ratio(table)
    return lambda counts: -(-ratio(counts)).exp()


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", _accuracy, is_mean=True, ceiling=1.0, percent=True),
        Metric("loss", _losses("loss"), is_mean=True),
        _metric("perplexity", _losses("perplexity"), _perplexity),
        _metric("macro_f1", _classes("macro_f1"), _by_class(_macro_f1), percent=True),
        _metric("micro_f1", _classes("micro_f1"), _by_class(_micro_f1), percent=True),
        _metric("balanced_accuracy", _classes("balanced_accuracy"), _by_class(_balanced_accuracy), percent=True),
        _metric("r2", _values("r2"), _r2),
        Metric("negative_mse", _errors("negative_mse", 2), is_mean=True),
        Metric("negative_mae", _errors("negative_mae", 1), is_mean=True),
        _metric("pearson", _values("pearson"), _pearson),
        _metric("spearman", _values("spearman"), _spearman),
        _metric("roc_auc", _binary, _auc),
    )
}
# What a task takes by itself: "loss" where samples have weights of their own, such as their tokens, and F1 where they
# have several labels.
WEIGHTED_LOSS = _metric("loss", _losses("perplexity"), _negative_ratio)
MULTI_LABEL = {
    "macro_f1": _metric("macro_f1", _hits("macro_f1"), _f1_of_hits(False), percent=True),
    "micro_f1": _metric("micro_f1", _hits("micro_f1"), _f1_of_hits(True), percent=True),
}
LOSSES = (METRICS["loss"], WEIGHTED_LOSS, METRICS["perplexity"])  # what a task computes by its own loss
