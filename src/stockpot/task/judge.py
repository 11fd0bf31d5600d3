"""How one batch is judged: the model's outputs, its loss, and the metric's statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.errors import TaskError
from stockpot.task.batches import (
    at_least_single,
    batch_rows,
    call,
    find_labels,
    find_logits,
    find_loss,
    need_logits,
    users_code,
)
from stockpot.task.loss import (
    Form,
    Loss,
    LossFunction,
    SampleLosses,
    cross_entropy,
    is_causal,
    is_pair,
    next_tokens,
    own_loss,
    same_tokens,
    sample_losses,
    users_losses,
)
from stockpot.task.metrics import LOSSES, loss_statistics
from stockpot.task.scores import Metric


class Judge:
    """A live model with a loss and a metric; batches are on the model's device, modes are the caller's."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        metric: Metric,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        self.model = model
        self.users_loss = loss
        self.metric = metric
        self.device = device
        self.autocast = autocast
        self.form: Form | None = None  # what the model's own loss is for each sample, where that is known
        self.has_own_loss = False  # whether the model computes one

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
        with self._running():
            return call(self.model, batch)

    def forward(self, batch: Any) -> None:
        """One forward pass in whatever way this task makes them."""
        if self.users_loss is None:
            self.call(batch)
        else:
            self.call_users_loss(batch)

    def call_users_loss(self, batch: Any) -> Any:
        assert self.users_loss is not None
        with users_code("loss", self.users_loss), self._running():
            return self.users_loss(self.model, batch)

    def logits(self, batch: Any) -> Tensor:
        """The live model's logits, in its current mode, in single precision or better."""
        return need_logits(self.call(batch), "logits")

    # Loss ---------------------------------------------------------------------------------------------

    def loss(self, batch: Any, *, label_smoothing: float = 0.0, beta: Tensor | None = None) -> Loss:
        """The live model's loss, in its current mode, on a batch on the device; `beta` multiplies the logits."""
        changed = bool(label_smoothing) or beta is not None
        if self.users_loss is not None:
            if changed:
                raise TaskError.of(
                    "label_smoothing or beta",
                    expected="the default loss, whose logits are known",
                    found="a loss of your own",
                    fix="build label smoothing or a factor of the logits into loss(model, batch)",
                )
            return users_losses(self.call_users_loss(batch), batch_rows(batch)).sum()
        return self._default_loss(self.call(batch), batch, label_smoothing, beta)

    def _default_loss(self, outputs: Any, batch: Any, label_smoothing: float = 0.0, beta: Tensor | None = None) -> Loss:
        labels = find_labels(batch)
        own = find_loss(outputs) if isinstance(batch, Mapping) else None
        if own is not None and not label_smoothing and beta is None:
            shift = self.form is next_tokens or (self.form is None and is_causal(self.model))
            return own_loss(own, find_logits(outputs), labels, batch_rows(batch), shift)
        logits = need_logits(outputs, "the default loss")
        if beta is not None:
            logits = logits * beta
        if self.form in (next_tokens, same_tokens) and not label_smoothing:
            assert self.form is not None
            return self.form(logits, labels).sum()
        return cross_entropy(logits, labels, label_smoothing=label_smoothing)

    # Metric -------------------------------------------------------------------------------------------

    def statistics(self, batch: Any, n: int, with_loss: bool) -> tuple[Tensor, Loss | None]:
        """The metric's statistics (n, m), and the loss if it is wanted and known."""
        if self.users_loss is not None and self.metric in LOSSES:
            losses = self.users_sample_losses(batch, n)
            return loss_statistics(self.metric, losses), losses.sum()
        outputs = self.call(batch)
        if self.metric in LOSSES:
            losses = self._sample_losses(outputs, batch)
            return loss_statistics(self.metric, losses), losses.sum()
        table = self.metric.of_batch(outputs, batch, n)
        if not with_loss:
            return table, None
        if self.users_loss is not None:
            return table, self.loss(batch)
        if not isinstance(batch, Mapping) or find_loss(outputs) is None:
            # A model that is judged by another metric may have no loss we know; its absence is nan, not an error.
            logits = find_logits(outputs)
            if logits is None or (self.metric.name != "accuracy" and not is_pair(logits, find_labels(batch))):
                return table, None
        return table, self._default_loss(outputs, batch)

    def statistics_of_logits(self, logits: Tensor, batch: Any) -> Tensor:
        """The metric's statistics (n, m) for logits from anywhere."""
        n = logits.shape[0]
        if self.metric in LOSSES:
            if self.users_loss is None:
                return loss_statistics(self.metric, self._sample_losses(logits, batch))
            reason = "a loss of your own calls the model itself"
        else:
            try:
                return self.metric.of_batch(logits, batch, n)
            except TaskError as error:
                if error.__cause__ is None:
                    raise
                reason = f"a metric that does not take a tensor of logits: {error.__cause__!r}"
        raise TaskError.of(
            "score of averaged logits",
            expected="a metric that needs logits and labels only",
            found=reason,
            fix='use metric="accuracy", or a metric that also takes logits as outputs',
        )

    def _sample_losses(self, outputs: Any, batch: Any) -> SampleLosses:
        logits = need_logits(outputs, f'metric="{self.metric.name}"')
        if self.form is not None:
            return self.form(logits, find_labels(batch).to(logits.device))
        if self.has_own_loss:
            raise self._whole_batch("a loss that the model computes for a whole batch")
        return sample_losses(at_least_single(logits), find_labels(batch))

    def users_sample_losses(self, batch: Any, n: int) -> SampleLosses:
        losses = users_losses(self.call_users_loss(batch), n)
        if n == 1:
            losses = SampleLosses(*(part.reshape(1) for part in losses))
        if not losses.totals.shape == losses.weights.shape == (n,):
            raise self._whole_batch("one number for a whole batch")
        return losses

    def _whole_batch(self, found: str) -> TaskError:
        return TaskError.of(
            f'metric="{self.metric.name}"',
            expected="a loss of each sample, shape (n,), from loss(model, batch)",
            found=found,
            fix="return one loss per sample instead of their mean (reduction='none'), or a pair of sums and weights"
            " per sample; or choose another metric",
        )
