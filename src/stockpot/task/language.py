"""Metrics of tokens: per token or byte, of entities, by choosing among options, and by generating.

Which columns of a batch they read is said in docs/metrics.md; `batches.JUDGED` keeps them away from the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stockpot.errors import TaskError
from stockpot.task.batches import find_labels, need_logits
from stockpot.task.loss import IGNORED, next_tokens
from stockpot.task.metric import Metric, mean_over, of_sums

MOST_CLASSES = 1000  # of token F1: a table has three numbers per class and sample
Decode = Callable[[list[list[int]]], Sequence[str]]


def column(batch: Any, name: str, metric: str) -> Tensor:
    found = batch.get(name) if isinstance(batch, Mapping) else None
    if not isinstance(found, Tensor):
        raise TaskError.of(
            f'batch for metric="{metric}"',
            expected=f"a dict with the column {name!r}",
            found=f"the columns {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "no dict",
            fix="add the column; docs/metrics.md says what it holds",
        )
    return found


# Tokens --------------------------------------------------------------------------------------------------


def _tokens(outputs: Any, batch: Any, name: str) -> tuple[Tensor, Tensor, int]:
    """Predicted and right class of each position (n, T), and the number of classes; NaN predicts -1."""
    logits, labels = need_logits(outputs, f'metric="{name}"'), find_labels(batch)
    whole = isinstance(labels, Tensor) and not labels.is_floating_point()
    if not whole or logits.ndim != 3 or labels.shape != logits.shape[:2]:
        shape = tuple(labels.shape) if isinstance(labels, Tensor) else None
        raise TaskError.of(
            f'metric="{name}"',
            expected="logits (n, T, classes) and whole labels (n, T)",
            found=f"logits {tuple(logits.shape)} with labels {shape}",
            fix='use it for models of tokens; for one label per sample metric="accuracy"',
        )
    return torch.where(logits.isnan().any(2), -1, logits.argmax(2)), labels.to(logits.device), logits.shape[2]


def _token_accuracy(outputs: Any, batch: Any) -> Tensor:
    found, labels, _ = _tokens(outputs, batch, "token_accuracy")
    return torch.stack([(found == labels).sum(1), (labels != IGNORED).sum(1)], dim=1)


def _token_classes(outputs: Any, batch: Any) -> Tensor:
    """How often each class was right, predicted and the label, (n, 3C)."""
    found, labels, classes = _tokens(outputs, batch, "token_f1")
    if classes > MOST_CLASSES:
        raise TaskError.of(
            'metric="token_f1"',
            expected=f"at most {MOST_CLASSES} classes",
            found=str(classes),
            fix='use metric="token_accuracy" for language models',
        )

    def counted(which: Tensor, kept: Tensor) -> Tensor:
        place = torch.where(kept & (which >= 0), which, classes)  # the last column is for nothing
        empty = torch.zeros(len(which), classes + 1, device=which.device)
        return empty.scatter_add_(1, place, torch.ones_like(place, dtype=empty.dtype))[:, :-1]

    known = labels != IGNORED
    return torch.cat([counted(labels, known & (found == labels)), counted(found, known), counted(labels, known)], dim=1)


_macro_f1 = of_sums(lambda right, said, true: mean_over(said + true > 0, 2 * right / (said + true)), 3)  # (B, C) each
# From right, predicted and true entities; 0 where there are none, as in seqeval.
_f1 = of_sums(lambda right, said, true: (2 * right / (said + true)).nan_to_num(0.0), 3)


def is_iob2(names: Sequence[str]) -> bool:
    return "O" in names and all(name == "O" or name[:2] in ("B-", "I-") for name in names)


def entity_f1(names: Sequence[str]) -> Metric:
    """F1 of whole entities, of classes with such names (O, B-X, I-X), as seqeval has it by default.

    An I-X that follows no X begins an entity. Positions without a label are passed over.
    """
    if not is_iob2(names):
        raise TaskError.of(
            'metric="entity_f1"',
            expected="class names O, B-X and I-X (IOB2)",
            found=f"the names {', '.join(names)[:200]}",
            fix="set id2label in the model's config.json, or give data.classes in a recipe, or metric=entity_f1(names)",
        )
    kinds = sorted({name[2:] for name in names} - {""})
    begins = torch.tensor([name.startswith("B-") for name in names])
    kind = torch.tensor([-1 if name == "O" else kinds.index(name[2:]) for name in names])

    def entities(tags: Tensor) -> tuple[Tensor, Tensor]:
        """Of tags (P,) in one row: whether an entity begins at each place, and where it ends; 0 elsewhere."""
        of = kind[tags]
        before = torch.cat([of.new_tensor([-1]), of[:-1]])
        start = (of >= 0) & (begins[tags] | (before != of))
        after = torch.cat([start[1:] | (of[1:] < 0), start.new_ones(1)])
        end = torch.zeros_like(tags)
        end[start] = ((of >= 0) & after).nonzero().flatten()
        return start, end

    def statistics(outputs: Any, batch: Any) -> Tensor:
        found, labels, classes = _tokens(outputs, batch, "entity_f1")
        found, labels = found.cpu(), labels.cpu()
        if classes != len(names):
            fix = "give the names of all classes, in their order"
            raise TaskError.of("names for entity_f1", expected=f"{classes}", found=str(len(names)), fix=fix)
        # All sequences in one row, with an O after each: no entity goes over an end.
        outside = names.index("O")
        known = torch.cat([labels != IGNORED, torch.ones(len(labels), 1, dtype=torch.bool)], dim=1)
        row = torch.arange(len(labels))[:, None].expand_as(known)[known]
        flat = [
            torch.cat([tags.clamp(min=0), torch.full((len(tags), 1), outside)], dim=1)[known]
            for tags in (found, labels)
        ]
        (said, said_end), (true, true_end) = map(entities, flat)
        right = said & true & (said_end == true_end) & (kind[flat[0]] == kind[flat[1]])
        sums = [torch.zeros(len(labels)).index_add_(0, row, each.float()) for each in (right, said, true)]
        return torch.stack(sums, dim=1)

    return Metric("entity_f1", statistics, percent=True, counted=_f1, tokens=True)


def _nameless(outputs: Any, batch: Any) -> Tensor:  # noqa: ARG001
    raise TaskError.of(
        'metric="entity_f1"',
        expected="names of the classes",
        found="a model without config.id2label",
        fix="give metric=entity_f1(['O', 'B-PER', 'I-PER', ...]) from stockpot.task.language",
    )


# Multiple choice --------------------------------------------------------------------------------------------


def _multiple_choice(name: str, *, normalised: bool) -> Metric:
    """Whether the right option has the highest log-likelihood, or that per character."""

    def statistics(model: Any, batch: Any) -> Tensor:
        options, labels, answer = (column(batch, key, name) for key in ("options", "option_labels", "answer"))
        scores = []
        for ids, wanted in zip(options.unbind(1), labels.unbind(1), strict=True):
            losses = next_tokens(need_logits(model(input_ids=ids), name), wanted)
            scores.append(torch.where(losses.weight > 0, -losses.total, -math.inf))
        score = torch.stack(scores, dim=1)  # (n, O)
        if normalised:
            score = score / column(batch, "option_lengths", name).to(score).clamp(min=1)
        right = (score.argmax(1) == answer.to(score.device)) & ~score.isnan().any(1)
        return right[:, None].to(score.dtype)

    return Metric(name, statistics, is_mean=True, ceiling=1.0, percent=True, calls_model=True)


# Generation ----------------------------------------------------------------------------------------------------


def exact_match(decode: Decode | None = None, max_new_tokens: int | None = None) -> Metric:
    """The share of answers that greedy generation gives exactly: the same tokens or, with `decode`, the same text.

    `decode` is such as `tokenizer.batch_decode`; blanks around a text do not count. Not more than `max_new_tokens` are
    generated, by default one more than the longest answer has. Samples without an answer are passed over.
    """

    def statistics(model: Any, batch: Any) -> Tensor:
        config = getattr(model, "config", None)
        both = bool(getattr(config, "is_encoder_decoder", False))  # then the prompt is the input
        keys = ("input_ids", "attention_mask", "labels") if both else ("prompt_ids", "prompt_mask", "answer_ids")
        if both and "answer_ids" in batch:  # of some samples only, where labels are of all
            keys = (*keys[:2], "answer_ids")
        prompt, mask, answers = (column(batch, key, "exact_match") for key in keys)
        settings = getattr(model, "generation_config", None)
        ends = getattr(settings, "eos_token_id", None)
        if settings is None or ends is None:
            raise TaskError.of(
                'metric="exact_match"',
                expected="a model with generate() and generation_config.eos_token_id, the token that ends an answer",
                found="no such model" if settings is None else "no end token",
                fix="use a transformers model, and set model.generation_config.eos_token_id",
            )
        ends = set(ends if isinstance(ends, (list, tuple)) else [ends])
        rows = (answers != IGNORED).any(1).nonzero().flatten()
        table = torch.zeros(len(answers), 2)
        if not len(rows):
            return table
        pad = settings.pad_token_id if settings.pad_token_id is not None else min(ends)
        made = model.generate(
            input_ids=prompt[rows], attention_mask=mask[rows], pad_token_id=pad, do_sample=False, num_beams=1,
            max_new_tokens=max_new_tokens or answers.shape[1] + 1,
        )[:, 1 if both else prompt.shape[1] :]  # fmt: skip
        found = [_until(row, ends) for row in made.tolist()]
        wanted = [[token for token in row if token != IGNORED and token not in ends] for row in answers[rows].tolist()]
        ended = [any(token in ends for token in row) for row in made.tolist()]
        if decode is None:
            right = [a == b and end for a, b, end in zip(found, wanted, ended, strict=True)]
        else:
            right = [a.strip() == b.strip() for a, b in zip(decode(found), decode(wanted), strict=True)]
        table[rows.cpu(), 0], table[rows.cpu(), 1] = torch.tensor(right).float(), 1.0
        return table

    return Metric("exact_match", statistics, ratio=1.0, percent=True, calls_model=True)


def _until(row: list[int], ends: set[int]) -> list[int]:
    return row[: next((place for place, token in enumerate(row) if token in ends), len(row))]


# By name --------------------------------------------------------------------------------------------------------


ENTITIES = Metric("entity_f1", _nameless, percent=True, counted=_f1, tokens=True)
METRICS = (
    Metric("token_accuracy", _token_accuracy, ratio=1.0, percent=True, tokens=True),
    Metric("token_f1", _token_classes, percent=True, counted=_macro_f1, tokens=True),
    ENTITIES,
    _multiple_choice("multiple_choice", normalised=False),
    _multiple_choice("multiple_choice_normalised", normalised=True),
    exact_match(),
)
