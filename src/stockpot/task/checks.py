"""What is known to be wrong before any long work: arguments, numbers, labels, a loss that teaches nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stockpot import ranks
from stockpot.errors import DataError, TaskError
from stockpot.task.batches import find_labels, leaves, map_tree
from stockpot.task.data import Data
from stockpot.task.loss import IGNORED, OWN, Loss, check_torch_loss
from stockpot.task.metric import Benchmark, Metric
from stockpot.task.metrics import CLASSES, METRICS, VARIED
from stockpot.task.shards import backward, needed, shard

_PIECE = 1024  # samples looked at together
ONE_OUTPUT = "0 (the model has one output)"
REPORT = "report"  # the name of the only set of report data
_TAKEN = ("fit", "held_out")  # what scores are called that are on other data


def check_arguments(model: Any, loss: Any, metric: Any, autocast: Any, batch_size: Any, statistics: Any) -> None:

    def wrong(subject: str, expected: str, found: Any, fix: str) -> TaskError:
        return TaskError.of(subject, expected=expected, found=str(found), fix=fix)

    if not isinstance(model, nn.Module):
        raise wrong("model", "a torch.nn.Module", type(model).__name__, "build the model and pass the instance")
    if loss is not None and not callable(loss):
        raise wrong("loss", "a function loss(model, batch)", repr(loss), "leave it out for the default loss")
    check_torch_loss(loss)
    if not callable(metric) and not isinstance(metric, Metric) and metric not in list(METRICS):
        names = f"{', '.join(map(repr, METRICS))}, a Metric, or a function metric(outputs, batch)"
        fix = "use one of these names, or a function whose higher values are better"
        raise wrong("metric", names, repr(metric), fix)
    if autocast not in (None, torch.bfloat16, torch.float16):
        fix = "use torch.bfloat16, or leave it out"
        raise wrong("autocast", "torch.bfloat16, torch.float16 or None", autocast, fix)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise wrong("batch_size", "a whole number of at least 1", repr(batch_size), "use 256")
    if statistics not in ("recalibrate", "average", "copy"):
        fix = "use 'recalibrate' unless the fitting data is unlike the training data"
        raise wrong("statistics", "'recalibrate', 'average' or 'copy'", repr(statistics), fix)


def report_sets(report: Any, groups: Any, fit: Any) -> dict[str, tuple[Any, Any]]:
    """All sets of report data by name, each with its groups; the first counts. One alone is called "report".

    A mapping is several sets where none of its values is a tensor: batches have tensors of their own, mostly labels.
    Where the fitting data is a mapping with the same keys, it is data of the same form.
    """
    columns = isinstance(report, Mapping) and any(isinstance(value, (Tensor, np.ndarray)) for value in report.values())
    if not isinstance(report, Mapping) or columns or (isinstance(fit, Mapping) and fit.keys() == report.keys()):
        return {} if report is None else {REPORT: (report, groups)}
    for name in report:
        if not isinstance(name, str) or name in _TAKEN or not re.fullmatch(r"[\w.-][\w .-]{0,39}", name):
            raise TaskError.of(
                "name of a set of report data",
                expected=f"up to 40 letters, digits, spaces, dots or hyphens, and none of {', '.join(_TAKEN)}",
                found=repr(name),
                fix="use a short name, such as 'shifted' or 'base domain'",
            )
    if groups is not None and not isinstance(groups, Mapping):
        fix = f"write report_groups={{{next(iter(report), 'test')!r}: groups}}"
        raise TaskError.of("report_groups", expected="a dict, as report is one", found=type(groups).__name__, fix=fix)
    if unknown := [name for name in groups or () if name not in report]:
        fix = f"use the names of report: {', '.join(report)}"
        raise TaskError.of("report_groups", expected="groups of sets that are there", found=repr(unknown[0]), fix=fix)
    for name in groups or ():
        if isinstance(report[name], Benchmark):  # whose questions stand for themselves
            raise TaskError.of("report_groups", "sets of samples", f"a benchmark in {name!r}", "leave its groups out")
    return {name: (source, (groups or {}).get(name)) for name, source in report.items()}


def place(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Move the model where it is wanted, divided among ranks where it is too large; or find out where it is."""
    if device is None:
        tensors = itertools.chain(model.parameters(), model.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))
    try:
        # Allocating fixes the index ("cuda" becomes "cuda:0") and fails early where there is no such device.
        found = torch.empty(0, device=torch.device(device)).device
        together = needed(model, found)
        if together is None:
            model.to(found)
    except (RuntimeError, AssertionError, TypeError) as error:  # a TypeError for float64 on Apple's devices
        raise TaskError.of(
            "device",
            expected="a device of this machine with room for the model",
            found=f"{device!s} ({str(error).splitlines()[0]})",
            fix="use device='cpu', or another that torch can see",
        ) from error
    if together is not None:
        shard(model, found, together)
    return found


# Data ------------------------------------------------------------------------------------------------


def check_finite(data: Data, *, labels: bool) -> None:
    """Refuse NaN and infinity, naming the first sample. Minus infinity is let through: additive masks are made of it.

    Without `labels` those may hold anything: a loss of the user's own may take NaN for "not known".
    """
    bad: set[int] = set()
    where, value = "", 0.0
    for start, tree in _rows(data):
        skipped = None if labels else find_labels(tree)
        for path, leaf in leaves(tree):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf is skipped:
                continue
            wrong = torch.isnan(leaf) | (leaf == torch.inf)
            found = (wrong.reshape(len(leaf), -1).any(dim=1).nonzero().flatten() + start).tolist()
            if found and not bad:
                where, value = path, float(leaf[wrong][0])
            bad.update(found)
    if bad:
        raise DataError.of(
            f"{data.name}{where and f', batch{where}'}",
            expected="finite numbers",
            found=f"{value} in sample {min(bad)} ({len(bad)} of {len(data)} samples have such)",
            fix="repair these samples or leave them out; a division by zero in preprocessing is a usual cause",
        )


def _rows(data: Data) -> Iterator[tuple[int, Any]]:
    """Stretches of samples: the first one's number, and a tree with a row for each. Uneven samples come one by one."""

    def row(leaf: Any) -> Any:
        if isinstance(leaf, (float, np.floating)) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"):
            leaf = torch.as_tensor(leaf)
        return leaf[None] if isinstance(leaf, Tensor) else leaf

    if data.columns is None:
        for index in range(len(data)):
            yield index, map_tree(row, data.sample(index))
    else:
        for start in range(0, len(data), _PIECE):
            yield start, data.batch(torch.arange(start, min(start + _PIECE, len(data))))


def check_targets(data: Data, logits: Tensor | None, metric: Metric, *, loss: bool, own: bool) -> None:
    """Labels that the default loss or a built-in metric would take for something else, or that no class has.

    Looked at on the host and in all of the data: an accelerator would die of a bad label without saying which.
    `loss`: the loss is not the user's. `own`: the model computes it.
    """
    targets = data.targets
    if targets is None or logits is None:
        return
    judged = metric in CLASSES or metric.tokens
    if targets.is_floating_point():
        rows = (judged or (loss and not own)) and targets.ndim == 2 and targets.shape[1:] == logits.shape[1:]
        # Every row must be a distribution over classes; multi-hot labels and measurements are none.
        if rows and (bool((targets < 0).any()) or bool(((targets.double().sum(1) - 1).abs() > 1e-3).any())):
            several = "rows of 0 and 1 with none or several ones (multi-hot)"
            raise DataError.of(
                f"labels of {data.name}",
                expected="class numbers (n,), or rows (n, classes) of probabilities that sum to 1",
                found=several if _binary(targets) else "rows of numbers that do not sum to 1",
                fix=OWN,
            )
    elif judged or loss:
        _check_classes(targets, logits, data.name, own and metric not in CLASSES)
    if metric in VARIED:
        columns = targets.reshape(len(targets), -1)
        others = metric.name == "roc_auc" and not _binary(targets)
        if others or bool((columns == columns[0]).all(0).any()):
            raise DataError.of(
                f'labels of {data.name} for metric="{metric.name}"',
                expected="labels 0 and 1, both of them" if metric.name == "roc_auc" else "targets that differ",
                found="others" if others else f"only {columns[0].tolist()}",
                fix="use another metric, or data in which the answers differ",
            )


def has_several_labels(targets: Tensor | None, logits: Tensor | None) -> bool:
    """Whether each sample has a 0 or 1 for each of the logits (n, C), and not always a single 1."""
    if targets is None or logits is None or logits.ndim != 2 or targets.shape[1:] != logits.shape[1:]:
        return False
    return _binary(targets) and (not targets.is_floating_point() or bool((targets.sum(1) != 1).any()))


def _binary(targets: Tensor) -> bool:
    return bool(((targets == 0) | (targets == 1)).all())


def _check_classes(labels: Tensor, logits: Tensor, name: str, own: bool) -> None:
    """Every label must be a class. Where a sample has several labels, -100 means none.

    Elsewhere what torch ignores in a loss is refused too: a sample without a label has no score, and none is not zero.
    """
    single = logits.ndim == 2 and labels.ndim == 1
    tokens = logits.ndim == 3 and labels.ndim == 2 and labels.shape[1:] == logits.shape[1:2]
    dense = logits.ndim in (4, 5) and labels.shape[1:] == logits.shape[2:]
    classes = logits.shape[2 if tokens else 1] if logits.ndim > 1 else 0
    if not (single or tokens or dense) or (own and single and classes == 1):
        return  # the last is a regression with whole numbers, whose loss the model brings, judged by another metric
    bad = (labels < 0) | (labels >= classes)
    if not single:
        bad &= labels != IGNORED
    if not bad.any():
        return
    first = tuple(bad.nonzero()[0].tolist())
    fix = "number the classes from 0, or build the model with the right number of classes"
    if classes == 1:  # two classes in one output, or a regression
        fix = f"{OWN}; in a recipe data.target: number or multi"
    elif int(labels.min()) == 1 and int(labels.max()) == classes:
        fix = "these labels count from 1; subtract 1"
    elif bool((labels[bad] == IGNORED).all()):
        fix = f"leave samples without a label ({IGNORED}) out of the data"
    raise DataError.of(
        f"labels of {name}",
        expected=f"0 to {classes - 1} (the model has {classes} classes)" if classes > 1 else ONE_OUTPUT,
        found=f"{int(labels[first])} at index {first[0] if single else first}"
        f" ({int(bad.sum())} of {labels.numel()} are out of range)",
        fix=fix,
    )


# Tokens ------------------------------------------------------------------------------------------------

IDS = ("input_ids", "decoder_input_ids", "prompt_ids", "options")


def check_tokens(data: Data, model: nn.Module, metric: Metric) -> None:
    """Ids that the model has no embedding for, sequences beyond its context, labels that are all masked, no options."""
    columns = data.columns
    if not isinstance(columns, Mapping) or not isinstance(columns.get("input_ids"), Tensor):
        return
    batch = {key: value for key, value in columns.items() if isinstance(value, Tensor)}
    if len(data) != len(batch["input_ids"]):
        batch = {key: value[data.rows(torch.arange(len(data)))] for key, value in batch.items()}
    find: Any = getattr(model, "get_input_embeddings", None)
    size = getattr(find() if callable(find) else None, "num_embeddings", None)
    for name in IDS:
        ids = batch.get(name)
        if size is None or ids is None or ids.is_floating_point() or not ids.numel():
            continue
        if int(ids.max()) >= size or int(ids.min()) < 0:
            raise DataError.of(
                f"{data.name}, column {name!r}",
                expected=f"token ids 0 to {size - 1} (the model's vocabulary)",
                found=f"{int(ids.max()) if int(ids.max()) >= size else int(ids.min())}",
                fix="use the tokenizer that the model was trained with",
            )
    _check_context(data, model, batch)
    labels = find_labels(batch)
    if isinstance(labels, Tensor) and not labels.is_floating_point() and bool((labels == IGNORED).all()):
        raise DataError.of(
            f"labels of {data.name}",
            expected="tokens to learn and to judge",
            found=f"{IGNORED} (masked) everywhere",
            fix="check what marks the tokens to learn: a chat template, the prompt's length, truncation",
        )
    if metric.name.startswith("multiple_choice") and {"option_labels", "answer"} <= batch.keys():
        _check_options(data.name, batch["option_labels"], batch["answer"])


def _check_context(data: Data, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    masks = {"input_ids": "attention_mask", "prompt_ids": "prompt_mask", "options": ""}
    for name, mask in masks.items():
        if name not in batch or not isinstance(longest, int) or batch[name].shape[-1] <= longest:
            continue
        read = batch[mask] != 0 if mask in batch else torch.ones_like(batch[name], dtype=torch.bool)
        lengths = read.sum(-1)
        if int(lengths.max()) > longest:
            raise DataError.of(
                f"{data.name}, column {name!r}",
                expected=f"sequences of at most {longest} tokens (the model's context)",
                found=f"{int(lengths.max())} tokens ({int((lengths > longest).sum())} of {len(data)} are too long)",
                fix="cut or pack the texts to the context when they are tokenised",
            )


def _check_options(name: str, labels: Tensor, answer: Tensor) -> None:
    there = (labels != IGNORED).any(2)  # (N, O)
    wrong = (answer < 0) | (answer >= labels.shape[1])
    if not bool(wrong.any()):
        wrong = ~there.gather(1, answer[:, None].long())[:, 0]
    problems = (
        ("an option with at least one token for each sample", ~there.any(1), "no options"),
        ("an answer among the sample's options", wrong, "another answer, or one without tokens"),
        ("a prompt before each option", (labels[:, :, 0] != IGNORED).any(1), "an option from the first token on"),
    )
    for expected, bad, found in problems:
        if bool(bad.any()):
            which = f"{found} in sample {int(bad.nonzero()[0])} ({int(bad.sum())} of {len(bad)} samples)"
            fix = "correct the options, or begin the prompt with the tokenizer's first token"
            raise DataError.of(f"{name}, multiple choice", expected=expected, found=which, fix=fix)


# The loss --------------------------------------------------------------------------------------------


def check_start(model: nn.Module, losses: Iterator[Loss]) -> None:
    """The loss must be a finite number with a gradient; a next one is computed if the first has none."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    flags = [p.requires_grad for p in parameters]
    found = "every parameter's gradient is None or exactly zero"
    try:
        # Freezing during fine-tuning says nothing about mixing, so frozen parameters count here.
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            for each in losses:
                loss = each.mean
                if not torch.isfinite(loss.detach()):
                    raise TaskError.of(
                        "loss at the start",
                        expected="a finite number",
                        found=str(float(loss.detach())),
                        fix="check the checkpoints for NaN or Inf, the data, and the autocast dtype",
                    )
                if loss.grad_fn is None:
                    found = "the loss has no gradient function"
                    break
                # The factor keeps small gradients from being rounded to zero in fp16, as it does while learning.
                found_here = any(g is not None and bool(g.any()) for g in gradients(model, 4096 * loss, parameters))
                if any(ranks.gathered(found_here)) if ranks.hold_parts(model) else found_here:
                    return
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
    fix = "call the given model inside loss(model, batch), without torch.no_grad() or .detach()"
    raise TaskError.of("loss", expected="a value that depends on the model's parameters", found=found, fix=fix)


def gradients(model: nn.Module, loss: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Of the loss by each parameter of the model; of one that is divided among ranks, this rank's rows."""
    if ranks.hold_parts(model):
        return backward(loss, parameters)
    return torch.autograd.grad(loss, parameters, allow_unused=True)
