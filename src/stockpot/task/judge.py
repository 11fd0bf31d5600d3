"""How one batch is judged: the model's outputs, its loss, and the metric's statistics."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.errors import EnsembleError, TaskError
from stockpot.task import batches
from stockpot.task import loss as losses
from stockpot.task.batches import batch_rows, find_labels, find_logits, find_loss, need_logits
from stockpot.task.checks import check_targets, check_tokens, has_several_labels
from stockpot.task.data import Data
from stockpot.task.language import ENTITIES, column, entity_f1
from stockpot.task.loss import Loss, TorchLoss, next_tokens, same_tokens, sample_losses, shifted
from stockpot.task.metric import Metric
from stockpot.task.metrics import BITS, LOSSES, METRICS, MULTI_LABEL, OURS, WEIGHTED_LOSS, loss_table


@dataclass
class Judge:
    """A live model with a loss and a metric; batches are on the model's device, modes are the caller's."""

    model: nn.Module
    users_loss: losses.LossFunction | None
    metric: Metric
    device: torch.device
    autocast: torch.dtype | None
    has_own_loss: bool = False  # whether the model computes one
    form: losses.Form | None = None  # the loss of each sample, if the user gave one of torch.nn or the model's is known
    can_scale_logits: bool = False  # whether `loss` takes beta
    width: int = 1  # numbers that the model returns for each sample
    leaves_labels_out: bool = False  # whether a causal model is called without its labels

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
        if self.leaves_labels_out and isinstance(batch, Mapping):
            # Its loss is computed from its logits here: in their precision, and once.
            batch = {key: value for key, value in batch.items() if key not in batches.LABEL_KEYS}
        with batches.models_code(self.model, batch), self._running():
            return batches.call(self.model, batch)

    @property
    def is_default(self) -> bool:
        """Whether the user gave no loss."""
        return self.users_loss is None and not isinstance(self.form, TorchLoss)

    @property
    def _shifts(self) -> bool:
        """Whether position t predicts the label at t + 1."""
        return self.form is next_tokens or (self.form is not same_tokens and losses.is_causal(self.model))

    def forward(self, batch: Any) -> None:
        """One forward pass in whatever way this task makes them."""
        self.call(batch) if self.users_loss is None else self.call_users_loss(batch)

    def call_users_loss(self, batch: Any) -> Any:
        assert self.users_loss is not None
        with batches.users_code("loss", self.users_loss, self.model, batch), self._running():
            return self.users_loss(self.model, batch)

    def logits(self, batch: Any) -> Tensor:
        """The live model's logits, in its current mode, in single precision or better."""
        return need_logits(self.call(batch), "logits")

    # Loss ---------------------------------------------------------------------------------------------

    def loss(self, batch: Any, *, label_smoothing: float = 0.0, beta: Tensor | None = None) -> Loss:
        """The live model's loss, in its current mode, on a batch on the device; `beta` multiplies the logits."""
        if (label_smoothing or beta is not None) and not self.is_default:
            fix = "build label smoothing or a factor of the logits into loss(model, batch)"
            needed = "the default loss, whose logits are known"
            raise TaskError.of("label_smoothing or beta", expected=needed, found="a loss of your own", fix=fix)
        if self.users_loss is not None:
            return losses.users_losses(self.call_users_loss(batch), batch_rows(batch)).sum()
        return self._default_loss(self.call(batch), batch, label_smoothing, beta)

    def _default_loss(self, outputs: Any, batch: Any, label_smoothing: float = 0.0, beta: Tensor | None = None) -> Loss:
        labels, form = find_labels(batch), self.form
        if isinstance(form, TorchLoss):
            return form(need_logits(outputs, form.name), labels).sum()
        own = find_loss(outputs) if isinstance(batch, Mapping) else None
        if form not in (next_tokens, same_tokens):
            if own is not None and not label_smoothing and beta is None:
                return losses.own_loss(own, find_logits(outputs), labels, batch_rows(batch), self._shifts)
            form = sample_losses
        logits = need_logits(outputs, "the default loss")
        return form(logits if beta is None else logits * beta, labels, label_smoothing).sum()

    # Metric -------------------------------------------------------------------------------------------

    def statistics(self, batch: Any, n: int, with_loss: bool) -> tuple[Tensor, Loss | None]:
        """The metric's statistics (n, m), and the loss if it is wanted and known."""
        if self.metric in LOSSES:
            if self.users_loss is not None:
                each = self._users_sample_losses(self.call_users_loss(batch), n)
            else:
                each = self._sample_losses(self.call(batch), batch)
            return self._loss_table(each, batch), each.sum()
        if self.metric.calls_model:
            with self._running():
                table = self.metric.of_batch(self.model, batch, n)
            return table, self.loss(batch) if with_loss else None
        outputs = self.call(batch)
        table = self.metric.of_batch(*self._judged(outputs, batch), n)
        if not with_loss:
            return table, None
        if self.users_loss is not None:
            return table, self.loss(batch)
        try:
            return table, self._default_loss(outputs, batch)
        except TaskError:  # of a model that another metric judges no loss need be known; that is nan, not an error
            return table, None

    def _loss_table(self, each: Loss, batch: Any) -> Tensor:
        count = column(batch, "bytes", "bits_per_byte") if self.metric == BITS else None
        return loss_table(each, not self.metric.is_mean, count)

    def _judged(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        """What the metric is given; for one of tokens, logits and labels of the same positions."""
        labels = find_labels(batch)
        if not self.metric.tokens or not isinstance(labels, Tensor) or labels.ndim != 2 or not self._shifts:
            return outputs, batch
        return need_logits(outputs, f'metric="{self.metric.name}"'), {"labels": shifted(labels)}

    def averaged(self, batch: Any) -> Tensor:
        """What an ensemble takes the mean of: logits or values, where that has a meaning."""
        if self.metric.calls_model:
            raise EnsembleError(f"{self.metric.name} calls the model itself")
        if self.metric in LOSSES and self.users_loss is not None:
            raise EnsembleError("a loss of your own as the metric, which calls the model itself")
        outputs = self.call(batch)
        found = find_logits(outputs)
        if found is None or not found.is_floating_point():
            what = f"outputs of type {type(outputs).__name__}" if found is None else f"outputs of {found.dtype}"
            raise EnsembleError(f"{what}, whose mean is no output")
        if found is not outputs and self.metric not in OURS and not self.metric.tokens:
            raise EnsembleError(f"{self.metric.name}, a metric of your own that is given more than a tensor of logits")
        return batches.at_least_single(found)

    def statistics_of_logits(self, logits: Tensor, batch: Any) -> Tensor:
        """The metric's statistics (n, m) for logits from anywhere."""
        if self.metric in LOSSES:
            return self._loss_table(self._sample_losses(logits, batch), batch)
        return self.metric.of_batch(*self._judged(logits, batch), logits.shape[0])

    def _sample_losses(self, outputs: Any, batch: Any) -> Loss:
        logits = need_logits(outputs, f'metric="{self.metric.name}"')
        if self.form is not None:
            return self.form(logits, find_labels(batch))
        labels = find_labels(batch)
        tokens = isinstance(labels, Tensor) and logits.ndim == 3 and labels.shape == logits.shape[:2]
        if tokens and self.metric not in (METRICS["loss"], WEIGHTED_LOSS):  # whatever else the model's own loss has
            return (next_tokens if self._shifts else same_tokens)(logits, labels)
        if self.has_own_loss:
            raise self._whole_batch("a loss that the model computes for a whole batch")
        return sample_losses(logits, labels)

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
        default = self.is_default
        check_tokens(data, self.model, self.metric)
        if self.metric == ENTITIES and (names := getattr(getattr(self.model, "config", None), "id2label", None)):
            self.metric = entity_f1([str(names[number]) for number in sorted(names)])
        if default and self.metric in METRICS.values() and isinstance(batch, Mapping):
            known = (*batches.JUDGED, *batches.LABEL_KEYS)
            if unread := [key for key in batches.not_taken(self.model, batch) if key not in known]:
                raise TaskError.of(
                    f"columns of the {data.name}",
                    expected=f"parameters of {type(self.model).__name__}.forward, and labels",
                    found=f"{', '.join(unread)}, which nothing reads",
                    fix="correct the name, leave the column out, or give a loss or metric of your own that reads it",
                )
        blank = batch  # no model trips over labels that are all zero
        if isinstance(batch, Mapping):
            zero = {
                key: batches.map_tensors(torch.zeros_like, batch[key]) for key in batches.LABEL_KEYS if key in batch
            }
            blank = {**batch, **zero}
        try:
            outputs = self.call(blank)
        except Exception:
            if self.users_loss is not None and self.metric in LOSSES:  # the user's loss knows how to call this model
                self._learn_form(batch, None)
                return
            raise
        logits, labels = find_logits(outputs), find_labels(batch)
        if first and logits is not None:
            self.width = max(1, logits.numel() // max(1, len(logits)))
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
            table, _ = self.statistics(batch, batch_rows(batch), with_loss=False)
            odd = bool(table.isnan().any()) and logits is not None and bool(logits.isfinite().all())
            if odd and self.metric.spoilt_by(table):
                raise TaskError.of(
                    f"metric {self.metric.name}",
                    expected="a number for each sample",
                    found=f"NaN for {int(table.isnan().any(1).sum())} of {len(table)}, from finite outputs",
                    fix="give what has no score the score 0, or leave such samples out of the data",
                )

    def _learn_form(self, batch: Any, logits: Tensor | None) -> None:
        """See which loss the model computes itself, and whether samples have weights of their own."""
        weighted = False
        if self.users_loss is not None:
            if self.metric in LOSSES:
                found = self.call_users_loss(batch)
                weighted = isinstance(found, (tuple, list))
                self._users_sample_losses(found, batch_rows(batch))
        elif isinstance(self.form, TorchLoss):
            if self.metric in LOSSES:
                found = self._sample_losses(self.call(batch), batch)
                weighted = self.form.counts_labels or bool((found.weight != 1).any())
        else:
            own = find_loss(outputs := self.call(batch)) if isinstance(batch, Mapping) else None
            if own is not None:
                self.has_own_loss = True
                self.form = losses.own_form(self.model, find_logits(outputs), find_labels(batch), own)
                weighted = self.form in (next_tokens, same_tokens)
                if self.form is next_tokens:
                    forward: Any = getattr(self.model, "_orig_mod", self.model).forward
                    given = inspect.signature(forward).parameters.get("labels")
                    self.leaves_labels_out = given is not None and given.default is None
            elif logits is not None:
                weighted = logits.ndim > 2  # several positions in each sample
            fits = logits is not None and losses.fit_together(logits, find_labels(batch))
            self.can_scale_logits = (
                fits if self.form is None else self.form in (sample_losses, next_tokens, same_tokens)
            )
        if weighted and self.metric == METRICS["loss"]:
            self.metric = WEIGHTED_LOSS
