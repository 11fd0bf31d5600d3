"""How one batch is judged: the model's outputs, its loss, and the metric's statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.errors import TaskError
from stockpot.task import batches
from stockpot.task import loss as losses
from stockpot.task.batches import batch_rows, find_labels, find_logits, find_loss, need_logits
from stockpot.task.checks import check_targets, has_several_labels
from stockpot.task.data import Data
from stockpot.task.loss import Loss, next_tokens, same_tokens, sample_losses
from stockpot.task.metrics import LOSSES, METRICS, MULTI_LABEL, WEIGHTED_LOSS, Metric, loss_table


@dataclass
class Judge:
    """A live model with a loss and a metric; batches are on the model's device, modes are the caller's."""

    model: nn.Module
    users_loss: losses.LossFunction | None
    metric: Metric
    device: torch.device
    autocast: torch.dtype | None
    has_own_loss: bool = False  # whether the model computes one
    form: losses.Form | None = None  # what that loss is for each sample, where it is known
    can_scale_logits: bool = False  # whether `loss` takes beta

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            with torch.autocast(self.device.type, self.autocast) if self.autocast else nullcontext():
                yield
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise TaskError.of(
                "a batch of one sample",
                expected="two or more: the model's normalisation layers take mean and variance from the batch",
                found=str(error),
                fix="raise batch_size, or cut batches into fewer pieces (accumulate)",
            ) from error

    def call(self, batch: Any) -> Any:
        # Where nothing of the user's own reads the batch, a column that the model does not take is a mistake.
        others = self.users_loss is not None or self.metric.name not in METRICS
        with self._running():
            return batches.call(self.model, batch, columns_of_others=others)

    def forward(self, batch: Any) -> None:
        """One forward pass in whatever way this task makes them."""
        self.call(batch) if self.users_loss is None else self.call_users_loss(batch)

    def call_users_loss(self, batch: Any) -> Any:
        assert self.users_loss is not None
        with batches.users_code("loss", self.users_loss), self._running():
            return self.users_loss(self.model, batch)

    def logits(self, batch: Any) -> Tensor:
        """The live model's logits, in its current mode, in single precision or better."""
        return need_logits(self.call(batch), "logits")

    # Loss ---------------------------------------------------------------------------------------------

    def loss(self, batch: Any, *, label_smoothing: float = 0.0, beta: Tensor | None = None) -> Loss:
        """The live model's loss, in its current mode, on a batch on the device; `beta` multiplies the logits."""
        if self.users_loss is not None:
            if label_smoothing or beta is not None:
                fix = "build label smoothing or a factor of the logits into loss(model, batch)"
                needed = "the default loss, whose logits are known"
                raise TaskError.of("label_smoothing or beta", expected=needed, found="a loss of your own", fix=fix)
            return losses.users_losses(self.call_users_loss(batch), batch_rows(batch)).sum()
        return self._default_loss(self.call(batch), batch, label_smoothing, beta)

    def _default_loss(self, outputs: Any, batch: Any, label_smoothing: float = 0.0, beta: Tensor | None = None) -> Loss:
        labels = find_labels(batch)
        own = find_loss(outputs) if isinstance(batch, Mapping) else None
        if own is not None and not label_smoothing and beta is None:
            shift = self.form is next_tokens or (self.form is None and losses.is_causal(self.model))
            return losses.own_loss(own, find_logits(outputs), labels, batch_rows(batch), shift)
        logits = need_logits(outputs, "the default loss")
        if beta is not None:
            logits = logits * beta
        if self.form is not None and self.form in (next_tokens, same_tokens) and not label_smoothing:
            return self.form(logits, labels).sum()
        return losses.cross_entropy(logits, labels, label_smoothing=label_smoothing)

    # Metric -------------------------------------------------------------------------------------------

    def statistics(self, batch: Any, n: int, with_loss: bool) -> tuple[Tensor, Loss | None]:
        """The metric's statistics (n, m), and the loss if it is wanted and known."""
        if self.metric in LOSSES:
            if self.users_loss is not None:
                each = self._users_sample_losses(self.call_users_loss(batch), n)
            else:
                each = self._sample_losses(self.call(batch), batch)
            return loss_table(each, not self.metric.is_mean), each.sum()
        outputs = self.call(batch)
        table = self.metric.of_batch(outputs, batch, n)
        if not with_loss:
            return table, None
        if self.users_loss is not None:
            return table, self.loss(batch)
        try:
            return table, self._default_loss(outputs, batch)
        except TaskError:  # of a model that another metric judges no loss need be known; that is nan, not an error
            return table, None

    def statistics_of_logits(self, logits: Tensor, batch: Any) -> Tensor:
        """The metric's statistics (n, m) for logits from anywhere."""
        if self.metric not in LOSSES:
            try:
                return self.metric.of_batch(logits, batch, logits.shape[0])
            except TaskError as error:
                if error.__cause__ is None:
                    raise
                reason = f"a metric that does not take a tensor of logits: {error.__cause__!r}"
        elif self.users_loss is None:
            return loss_table(self._sample_losses(logits, batch), not self.metric.is_mean)
        else:
            reason = "a loss of your own calls the model itself"
        raise TaskError.of(
            "score of averaged logits",
            expected="a metric that needs logits and labels only",
            found=reason,
            fix='use metric="accuracy", or a metric that also takes logits as outputs',
        )

    def _sample_losses(self, outputs: Any, batch: Any) -> Loss:
        logits = need_logits(outputs, f'metric="{self.metric.name}"')
        if self.form is not None:
            return self.form(logits, find_labels(batch).to(logits.device))
        if self.has_own_loss:
            raise self._whole_batch("a loss that the model computes for a whole batch")
        return sample_losses(logits, find_labels(batch))

    def _users_sample_losses(self, found: Any, n: int) -> Loss:
        each = losses.users_losses(found, n)
        if n == 1:
            each = Loss(*(part.reshape(1) for part in each))
        if not each.total.shape == each.weight.shape == (n,):
            raise self._whole_batch("one number for a whole batch")
        return each

    def _whole_batch(self, found: str) -> TaskError:
        return TaskError.of(
            f'metric="{self.metric.name}"',
            expected="a loss of each sample, shape (n,), from loss(model, batch)",
            found=found,
            fix="return one loss per sample instead of their mean (reduction='none'), or a pair of sums and weights"
            " per sample; or choose another metric",
        )

    # What a first few samples tell --------------------------------------------------------------------

    def try_batch(self, data: Data, batch: Any, *, first: bool) -> None:
        """Refuse labels outside the model's classes, and a model that cannot be called or judged on this batch of data.

        The first data also decides which form of the loss and the metric is meant.
        """
        default = self.users_loss is None
        try:
            outputs = self.call(_with_blank_labels(batch))
        except Exception as error:
            if not default and self.metric in LOSSES:  # the user's loss knows how to call this model
                self._learn_form(batch, None)
                return
            if isinstance(error, TaskError):
                raise
            raise TaskError.of(
                f"model {type(self.model).__name__}",
                expected=f"a model that can be called on a batch of the {data.name}",
                found=f"{type(error).__name__}: {error}",
                fix="make batches (inputs, labels) or dicts of keyword arguments; or give loss=lambda model, batch:"
                ' ... with one loss per sample and metric="loss"',
            ) from error
        logits, labels = find_logits(outputs), find_labels(batch)
        if first and self.metric in METRICS.values() and has_several_labels(data.targets, logits):
            self.metric = MULTI_LABEL.get(self.metric.name, self.metric)
        accuracy = self.metric == METRICS["accuracy"]
        if default and accuracy:  # before a model of its own loss sees labels that are no classes
            losses.check_pair(need_logits(outputs, 'metric="accuracy"'), labels, 'metric="accuracy"')
        own = isinstance(batch, Mapping) and find_loss(outputs) is not None
        check_targets(data, logits, self.metric, loss=default, own=own)
        if first:
            self._learn_form(batch, logits)
        if default or not accuracy:
            self.statistics(batch, batch_rows(batch), with_loss=False)

    def _learn_form(self, batch: Any, logits: Tensor | None) -> None:
        """See which loss the model computes itself, and whether samples have weights of their own."""
        weighted = False
        if self.users_loss is not None:
            if self.metric in LOSSES:
                found = self.call_users_loss(batch)
                weighted = isinstance(found, (tuple, list))
                self._users_sample_losses(found, batch_rows(batch))
        else:
            own = find_loss(outputs := self.call(batch)) if isinstance(batch, Mapping) else None
            if own is not None:
                self.has_own_loss = True
                self.form = losses.own_form(self.model, find_logits(outputs), find_labels(batch), own)
                weighted = self.form in (next_tokens, same_tokens)
            elif logits is not None:
                weighted = logits.ndim > 2  # several positions in each sample
            fits = logits is not None and losses.fit_together(logits, find_labels(batch))
            self.can_scale_logits = (
                fits if self.form is None else self.form in (sample_losses, next_tokens, same_tokens)
            )
        if weighted and self.metric == METRICS["loss"]:
            self.metric = WEIGHTED_LOSS


def _with_blank_labels(batch: Any) -> Any:
    """A batch that no model can trip over because of its labels: all of them zero."""
    if not isinstance(batch, Mapping):
        return batch
    return {
        key: batches.map_tensors(torch.zeros_like, value) if key in batches.LABEL_KEYS else value
        for key, value in batch.items()
    }
