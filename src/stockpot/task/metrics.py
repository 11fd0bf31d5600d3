"""A metric is statistics of each sample and a reduction of all of them to one number.

The built-in ones are as scikit-learn and scipy define them; losses and errors are negated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stockpot.errors import TaskError
from stockpot.task import language
from stockpot.task.batches import find_labels, need_logits
from stockpot.task.loss import IGNORED, Loss, check_pair, sample_losses
from stockpot.task.metric import Counted, Metric, Reduction, mean_over, of_sums

MetricFunction = Callable[[Any, Any], Any]
Statistics = Callable[[Tensor, Any, str], Tensor]  # logits, labels, purpose (for messages) -> (n, m)


def as_metric(metric: str | Metric | MetricFunction) -> Metric:
    """What a task was given, as a `Metric`."""
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        return METRICS[metric]
    # Of functools.partial what it wraps, of an object its class.
    name = getattr(getattr(metric, "func", metric), "__name__", type(metric).__name__)
    return Metric("score" if name == "<lambda>" else name, metric, is_mean=True)


# Statistics of samples ----------------------------------------------------------------------------------


def _predictions(logits: Tensor, labels: Any, purpose: str) -> tuple[Tensor, Tensor]:
    """Predicted and right classes, (n, ...) each; a prediction of NaN is class -1, which is never right."""
    target = check_pair(logits, labels, purpose)
    predicted = torch.where(logits.isnan().any(1), -1, logits.argmax(1))
    return predicted, target.argmax(1) if target.is_floating_point() else target


def _accuracy(logits: Tensor, labels: Any, purpose: str) -> Tensor:
    """1 or 0 for each sample; for several positions the share of right ones among those with a label."""
    predicted, target = _predictions(logits, labels, purpose)
    right, valid = (part.reshape(len(logits), -1).sum(1) for part in (predicted == target, target != IGNORED))
    return (right.to(logits.dtype) / valid.clamp(min=1))[:, None]


def _classes(logits: Tensor, labels: Any, purpose: str) -> Tensor:
    """(predicted, label) of each sample."""
    if logits.ndim > 2:
        raise _unfit(purpose, "one label per sample", logits, labels)
    return torch.stack(_predictions(logits, labels, purpose), dim=1)


def _hits(logits: Tensor, labels: Any, purpose: str) -> Tensor:
    """True positives, false positives and misses of each label, (n, 3C); a logit above 0 says yes, NaN is a miss."""
    if not isinstance(labels, Tensor) or labels.shape != logits.shape:
        raise _unfit(purpose, "a logit for each label", logits, labels)
    yes, label = logits > 0, labels.to(logits.device) > 0
    return torch.cat([yes & label, yes & ~label, ~yes & label], dim=1).to(logits.dtype)


def _binary(logits: Tensor, labels: Any, purpose: str) -> Tensor:
    """(score of class 1, label) of each sample."""
    two = logits.ndim == 2 and logits.shape[1] == 2
    # A difference has the order of the probability, without its ties near 0 and 1.
    score = logits[:, 1] - logits[:, 0] if two else logits.reshape(-1)
    if not isinstance(labels, Tensor) or not labels.numel() == len(score) == len(logits):
        raise _unfit(purpose, "one score or two logits, and one label, per sample", logits, labels)
    return torch.stack([score, labels.reshape(-1).to(score)], dim=1)


def _values(found: Tensor, labels: Any, purpose: str) -> Tensor:
    """Predictions and targets side by side, (n, 2D), for outputs and float targets (n,) or (n, D)."""
    if not isinstance(labels, Tensor) or not labels.is_floating_point():
        kind = str(labels.dtype).removeprefix("torch.") if isinstance(labels, Tensor) else "no"
        fix = "give measurements as float tensors, such as y.float()"
        raise TaskError.of(purpose, expected="float targets", found=f"{kind} labels", fix=fix)
    n = len(found)
    if len(labels) != n or labels.numel() != found.numel():
        raise _unfit(purpose, "one output for each target", found, labels)
    return torch.cat([found.reshape(n, -1), labels.to(found).reshape(n, -1)], dim=1)


def _errors(outputs: Tensor, labels: Any, purpose: str) -> Tensor:
    found, target = _values(outputs, labels, purpose).chunk(2, dim=1)
    return found - target


def _losses(weighted: bool) -> Statistics:
    return lambda logits, labels, _: loss_table(sample_losses(logits, labels), weighted)


def loss_table(losses: Loss, weighted: bool, count: Tensor | None = None) -> Tensor:
    """What a metric of the loss keeps of each sample: its loss, negated, or its summed loss and weight (or `count`)."""
    if not weighted:
        return -losses.total[:, None]
    return torch.stack([losses.total, losses.weight if count is None else count.to(losses.total)], dim=1)


def _total_and_bytes(outputs: Any, batch: Any) -> Tensor:
    purpose = 'metric="bits_per_byte"'
    losses = sample_losses(need_logits(outputs, purpose), find_labels(batch))
    return loss_table(losses, True, language.column(batch, "bytes", "bits_per_byte"))


def _unfit(purpose: str, expected: str, outputs: Tensor, labels: Any) -> TaskError:
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else None for part in (outputs, labels)]
    found = f"outputs {shapes[0]} with labels {shapes[1]}"
    return TaskError.of(purpose, expected=expected, found=found, fix="use a metric that fits the task")


# Reductions of all samples ----------------------------------------------------------------------------


def _f1(hit: Tensor, false: Tensor, missed: Tensor) -> Tensor:
    """0 for a label that neither occurs nor is predicted, as scikit-learn has it."""
    return (2 * hit / (2 * hit + false + missed)).nan_to_num(0.0)


def _centred(values: Tensor) -> Tensor:
    """(N, D) about its mean; a constant is exactly zero."""
    return torch.where((values == values[0]).all(0), 0, values - values.mean(0))


def _spread(sums: Tensor, squares: Tensor, n: Tensor) -> Tensor:
    """The sum of squares about the mean; zero where it is what rounding leaves of a constant."""
    found = squares - sums.square() / n
    return torch.where(found <= 1e-13 * squares, 0, found)


def _r2_columns(table: Tensor) -> list[Tensor]:
    found, target = table.chunk(2, dim=1)
    centred = _centred(target)
    return [(target - found).square(), centred, centred.square(), torch.ones_like(target)]


def _r2(left: Tensor, sums: Tensor, squares: Tensor, n: Tensor) -> Tensor:
    """For targets that are all the same: 1 if every one is met, else 0, as in scikit-learn."""
    spread = _spread(sums, squares, n)
    return torch.where(spread == 0, (left == 0).to(left), 1 - left / spread)


def _pearson_columns(table: Tensor) -> list[Tensor]:
    x, y = map(_centred, table.chunk(2, dim=1))
    return [x, y, x * x, x * y, y * y, torch.ones_like(x)]


def _pearson(x: Tensor, y: Tensor, xx: Tensor, xy: Tensor, yy: Tensor, n: Tensor) -> Tensor:
    return _correlation(_spread(x, xx, n), xy - x * y / n, _spread(y, yy, n))


def _correlation(xx: Tensor, xy: Tensor, yy: Tensor) -> Tensor:
    """From sums of products about the means: 0 for constant predictions, NaN for constant targets."""
    r = torch.where(xx == 0, 0, (xy / (xx * yy).sqrt()).clamp(-1, 1))
    return torch.where(yy == 0, math.nan, r)


def _totals(counts: Tensor, group: Tensor, size: int) -> Tensor:
    """How often samples of each group were drawn, (B, size)."""
    return counts.new_zeros(len(counts), size).index_add_(1, group, counts)


def _by_class(value: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Reduction:
    """From how often each class was right, predicted and the label, (B, C) each, to values (B, 1)."""

    def counted(table: Tensor) -> Counted:
        predicted, label = (table.long() + 1).unbind(1)  # class -1 becomes 0
        right, size = (predicted == label).to(table.dtype), int(table.max()) + 2

        def values(counts: Tensor) -> Tensor:
            drawn = ((counts * right, label), (counts, predicted), (counts, label))
            return value(*(_totals(count, group, size)[:, 1:] for count, group in drawn)).mean(1)

        return values

    return counted


def _groups(values: Tensor) -> tuple[Tensor, int]:
    """Equal values are one group; groups are in the values' order. (N,) and how many."""
    _, group = torch.unique(values, return_inverse=True)
    return group, int(group.max()) + 1


def _auc(table: Tensor) -> Counted:
    """How often a sample of class 1 has the higher score, ties half; NaN where only one class is."""
    group, size = _groups(table[:, 0])

    def values(counts: Tensor) -> Tensor:
        positive = counts * table[:, 1]
        above, below = _totals(positive, group, size), _totals(counts - positive, group, size)
        return (above * (below.cumsum(1) - below / 2)).sum(1) / (above.sum(1) * below.sum(1))

    return values


def _spearman(table: Tensor) -> Counted:
    """The correlation of ranks among all that were drawn; ties share theirs."""
    columns = [_groups(column) for column in table.T]

    def ranks(counts: Tensor, group: Tensor, size: int) -> Tensor:  # (B, N), with a mean of zero
        totals = _totals(counts, group, size)
        return (totals.cumsum(1) - totals / 2 - counts.sum(1, keepdim=True) / 2)[:, group]

    def values(counts: Tensor) -> Tensor:
        outputs = []
        for found, target in zip(columns[: len(columns) // 2], columns[len(columns) // 2 :], strict=True):
            x, y = ranks(counts, *found), ranks(counts, *target)
            cx = counts * x
            outputs.append(_correlation((cx * x).sum(1), (cx * y).sum(1), (counts * y * y).sum(1)))
        return torch.stack(outputs).mean(0)

    return values


# The metrics -------------------------------------------------------------------------------------------


def _metric(name: str, statistics: Statistics, counted: Reduction | None = None) -> Metric:
    """A mean, or what `counted` makes of all samples."""
    purpose, percent = f'metric="{name}"', name.endswith(("accuracy", "f1"))

    def of_outputs(outputs: Any, batch: Any) -> Tensor:
        return statistics(need_logits(outputs, purpose), find_labels(batch), purpose)

    ceiling = 1.0 if name == "accuracy" else None
    return Metric(name, of_outputs, is_mean=counted is None, ceiling=ceiling, percent=percent, counted=counted)


_BUILT_IN: dict[str, tuple[Statistics, Reduction | None]] = {
    "accuracy": (_accuracy, None),
    "loss": (_losses(weighted=False), None),
    "perplexity": (_losses(weighted=True), of_sums(lambda total, weight: -(total / weight).exp())),
    "macro_f1": (_classes, _by_class(lambda right, said, true: mean_over(said + true > 0, 2 * right / (said + true)))),
    # Every sample has one prediction, so precision is recall.
    "micro_f1": (_classes, _by_class(lambda right, _, true: right.sum(1, True) / true.sum(1, True))),
    "balanced_accuracy": (_classes, _by_class(lambda right, _, true: mean_over(true > 0, right / true))),
    "r2": (_values, of_sums(_r2, _r2_columns)),
    "negative_mse": (lambda *given: -_errors(*given).square().mean(1, keepdim=True), None),
    "negative_mae": (lambda *given: -_errors(*given).abs().mean(1, keepdim=True), None),
    "pearson": (_values, of_sums(_pearson, _pearson_columns)),
    "spearman": (_values, _spearman),
    "roc_auc": (_binary, _auc),
}
METRICS = {name: _metric(name, *parts) for name, parts in _BUILT_IN.items()}
NATS = Metric("nats_per_token", METRICS["perplexity"].statistics, ratio=-1.0)
BITS = Metric("bits_per_byte", _total_and_bytes, ratio=-1 / math.log(2))
METRICS |= {metric.name: metric for metric in (NATS, BITS, *language.METRICS)}
# What a task takes by itself: "loss" where samples have weights of their own, such as their tokens, and F1 where they
# have several labels.
WEIGHTED_LOSS = Metric("loss", METRICS["perplexity"].statistics, ratio=-1.0)
MULTI_LABEL = {
    "macro_f1": _metric("macro_f1", _hits, of_sums(_f1, 3)),
    "micro_f1": _metric("micro_f1", _hits, of_sums(_f1, lambda t: [p.sum(1, keepdim=True) for p in t.chunk(3, 1)])),
}
# What is asked of labels before anything long: that they are classes of the model, or that they differ.
CLASSES = [METRICS[name] for name, (statistics, _) in _BUILT_IN.items() if statistics in (_accuracy, _classes)]
VARIED = [METRICS[name] for name in ("roc_auc", "pearson", "spearman")]  # which constant targets leave without a value
OURS = (*METRICS.values(), WEIGHTED_LOSS, *MULTI_LABEL.values())
# What a task computes by its own loss.
LOSSES = (METRICS["loss"], WEIGHTED_LOSS, METRICS["perplexity"], NATS, BITS)
