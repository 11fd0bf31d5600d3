"""What can be known to be wrong without running the model: arguments, numbers, labels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stockpot.errors import DataError, TaskError
from stockpot.task.batches import find_labels, leaves
from stockpot.task.data import Data
from stockpot.task.loss import IGNORED, OWN, are_probabilities
from stockpot.task.metrics import METRICS
from stockpot.task.scores import Metric

STATISTICS = ("recalibrate", "average", "copy")
CLASSES = [METRICS[name] for name in ("accuracy", "macro_f1", "micro_f1", "balanced_accuracy")]
AUTOCAST = (None, torch.bfloat16, torch.float16)
_PIECE = 1024  # samples looked at together


def check_arguments(model: Any, loss: Any, metric: Any, autocast: Any, batch_size: Any, statistics: Any) -> None:
    if not isinstance(model, nn.Module):
        raise _wrong("model", "a torch.nn.Module", type(model).__name__, "build the model and pass the instance")
    if loss is not None and not callable(loss):
        raise _wrong("loss", "a function loss(model, batch)", repr(loss), "leave it out for the default loss")
    named = isinstance(metric, str) and metric in METRICS
    if not callable(metric) and not isinstance(metric, Metric) and not named:
        raise _wrong(
            "metric",
            f"{', '.join(map(repr, METRICS))}, a Metric, or a function metric(outputs, batch)",
            repr(metric),
            "use one of these names, or a function whose higher values are better",
        )
    if autocast not in AUTOCAST:
        raise _wrong(
            "autocast", "torch.bfloat16, torch.float16 or None", repr(autocast), "use torch.bfloat16, or leave it out"
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise _wrong("batch_size", "a whole number of at least 1", repr(batch_size), "use 256")
    if statistics not in STATISTICS:
        raise _wrong(
            "statistics",
            ", ".join(map(repr, STATISTICS[:-1])) + f" or {STATISTICS[-1]!r}",
            repr(statistics),
            "use 'recalibrate' unless the fitting data is unlike the training data",
        )


def place(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Move the model where it is wanted, or find out where it is."""
    if device is None:
        tensors = itertools.chain(model.parameters(), model.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))
    try:
        wanted = torch.device(device)
        # Allocating fixes the index ("cuda" becomes "cuda:0") and fails early where there is no such device.
        found = torch.empty(0, device=wanted).device
        model.to(found)
    except (RuntimeError, AssertionError, TypeError) as error:  # a TypeError for float64 on Apple's devices
        raise _wrong(
            "device",
            "a device of this machine with room for the model",
            f"{device!s} ({str(error).splitlines()[0]})",
            "use device='cpu', or another that torch can see",
        ) from error
    return found


def _wrong(subject: str, expected: str, found: str, fix: str) -> TaskError:
    return TaskError.of(subject, expected=expected, found=found, fix=fix)


# Data ------------------------------------------------------------------------------------------------


def check_finite(data: Data, *, labels: bool) -> None:
    """Refuse NaN and infinity, naming the first sample. Minus infinity is let through: additive masks are made of it.

    Without `labels` those may hold anything: a loss of the user's own may take NaN for "not known".
    """
    bad: list[int] = []
    where, value = "", 0.0
    for start, path, rows in _parts(data, labels):
        wrong = torch.isnan(rows) | (rows == torch.inf)
        found = wrong.reshape(len(rows), -1).any(dim=1).nonzero().flatten() + start
        if not bad and len(found):
            where, value = path, float(rows[wrong][0])
        bad += found.tolist()
    if bad:
        samples = sorted(set(bad))
        raise DataError.of(
            f"{data.name}{where and f', batch{where}'}",
            expected="finite numbers",
            found=f"{value} in sample {samples[0]} ({len(samples)} of {len(data)} samples have such)",
            fix="repair these samples or leave them out; a division by zero in preprocessing is a usual cause",
        )


def _parts(data: Data, labels: bool) -> Iterator[tuple[int, str, Tensor]]:
    """Stretches of real numbers: the first sample, the place in the batch, one row for each sample."""
    columns = data.columns
    for start in range(0, len(data), _PIECE):
        indices = torch.arange(start, min(start + _PIECE, len(data)))
        if columns is None:
            for index in indices.tolist():
                for path, leaf in _reals(data.sample(index), labels):
                    yield index, path, leaf[None]
        else:
            rows = data.rows(indices)
            for path, column in _reals(columns, labels):
                yield start, path, column[rows]


def _reals(tree: Any, labels: bool) -> Iterator[tuple[str, Tensor]]:
    skipped = None if labels else find_labels(tree)
    for path, leaf in leaves(tree):
        if skipped is not None and leaf is skipped:
            continue
        if isinstance(leaf, (float, np.ndarray, np.floating)):
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind != "f":
                continue
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield path, leaf


def check_targets(data: Data, logits: Tensor | None, metric: Metric, *, loss: bool, own: bool) -> None:
    """Labels that the default loss or a built-in metric would take for something else, or that no class has.

    Looked at on the host and in all of the data: an accelerator would die of a bad label without saying which.
    `loss`: the loss is not the user's. `own`: the model computes it.
    """
    targets = data.targets
    if targets is None or logits is None:
        return
    judged = metric in CLASSES
    if targets.is_floating_point():
        if (judged or (loss and not own)) and targets.ndim == 2 and targets.shape[1:] == logits.shape[1:]:
            _check_probabilities(targets, data.name)
    elif judged or loss:
        _check_classes(targets, logits, data.name, own)
    if metric in (METRICS["roc_auc"], METRICS["pearson"], METRICS["spearman"]):
        _check_variety(targets, metric.name, data.name)


def has_several_labels(targets: Tensor | None, logits: Tensor | None) -> bool:
    """Whether each sample has a 0 or 1 for each of the logits (n, C), and not always a single 1."""
    if targets is None or logits is None or logits.ndim != 2 or targets.shape[1:] != logits.shape[1:]:
        return False
    hot = bool(((targets == 0) | (targets == 1)).all())
    return hot and (not targets.is_floating_point() or bool((targets.sum(1) != 1).any()))


def _check_probabilities(targets: Tensor, name: str) -> None:
    if are_probabilities(targets):
        return
    several = "rows of 0 and 1 with none or several ones (multi-hot)"
    raise DataError.of(
        f"labels of {name}",
        expected="class numbers (n,), or rows (n, classes) of probabilities that sum to 1",
        found=several if bool(((targets == 0) | (targets == 1)).all()) else "rows of numbers that do not sum to 1",
        fix=OWN,
    )


def _check_classes(targets: Tensor, logits: Tensor, name: str, own: bool) -> None:
    single = logits.ndim == 2 and targets.ndim == 1
    tokens = logits.ndim == 3 and targets.ndim == 2 and targets.shape[1:] == logits.shape[1:2]
    dense = logits.ndim in (4, 5) and targets.shape[1:] == logits.shape[2:]
    if own and single and logits.shape[1] == 1:
        return  # a regression with whole numbers, whose loss the model brings
    if single:
        check_labels(targets, logits.shape[1], name)
    elif tokens or dense:
        check_labels(targets, logits.shape[2 if tokens else 1], name, ignored=True)


def check_labels(labels: Tensor, classes: int, name: str, *, ignored: bool = False) -> None:
    """Every label must be a class. With `ignored`, for several labels per sample, -100 means none.

    Otherwise what torch ignores in a loss is refused too: a sample without a label has no score, and none is not zero.
    """
    bad = (labels < 0) | (labels >= classes)
    if ignored:
        bad &= labels != IGNORED
    if not bad.any():
        return
    first = tuple(bad.nonzero()[0].tolist())
    index = first[0] if len(first) == 1 else first
    fix = "number the classes from 0, or build the model with the right number of classes"
    if classes == 1:  # two classes in one output, or a regression
        fix = OWN
    elif int(labels.min()) == 1 and int(labels.max()) == classes:
        fix = "these labels count from 1; subtract 1"
    elif bool((labels[bad] == IGNORED).all()):
        fix = f"leave samples without a label ({IGNORED}) out of the data"
    raise DataError.of(
        f"labels of {name}",
        expected=f"0 to {classes - 1} (the model has {classes} classes)",
        found=f"{int(labels[first])} at index {index} ({int(bad.sum())} of {labels.numel()} are out of range)",
        fix=fix,
    )


def _check_variety(targets: Tensor, metric: str, name: str) -> None:
    columns = targets.reshape(len(targets), -1)
    constant = bool((columns == columns[0]).all(0).any())
    others = metric == "roc_auc" and not bool(((targets == 0) | (targets == 1)).all())
    if constant or others:
        raise DataError.of(
            f'labels of {name} for metric="{metric}"',
            expected="labels 0 and 1, both of them" if metric == "roc_auc" else "targets that differ",
            found="others" if others else f"only {columns[0].tolist()}",
            fix="use another metric, or data in which the answers differ",
        )
