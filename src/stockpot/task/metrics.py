"""How one batch is judged: the model's outputs, its loss, and the metric's scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.errors import TaskError, describe
from stockpot.task.checks import check_scalar
from stockpot.task.classify import accuracy, cross_entropy, is_pair, sample_losses
from stockpot.task.outputs import at_least_single, call, find_labels, find_logits, find_loss, need_logits

Loss = Callable[[nn.Module, Any], Tensor]
Metric = Callable[[Any, Any], Any]


class Judge:
    """A live model with a loss and a metric; batches are on the model's device, modes are the caller's."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        metric: str | Metric,
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        self.model = model
        self.own_loss = loss
        self.metric = metric
        self.device = device
        self.autocast = autocast

    def _cast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def call(self, batch: Any) -> Any:
        with self._cast():
            return call(self.model, batch)

    def forward(self, batch: Any) -> None:
        """One forward pass in whatever way this task makes them."""
        if self.own_loss is None:
            self.call(batch)
        else:
            with self._cast():
                self.own_loss(self.model, batch)

    def loss(self, batch: Any, *, label_smoothing: float = 0.0, temperature: Tensor | None = None) -> Tensor:
        """Mean loss of the live model, in its current mode, on a batch on the device.

        `temperature` multiplies the logits, as in Learned-Soup.
        """
        changed = bool(label_smoothing) or temperature is not None
        if self.own_loss is not None:
            if changed:
                raise TaskError(
                    describe(
                        "label_smoothing or temperature",
                        expected="the default loss, whose logits are known",
                        found="a loss of your own",
                        fix="build smoothing or temperature into loss(model, batch)",
                    )
                )
            with self._cast():
                own = self.own_loss(self.model, batch)
            return at_least_single(check_scalar(own))
        outputs = self.call(batch)
        loss = None if changed or not isinstance(batch, Mapping) else find_loss(outputs)
        if loss is not None:
            return at_least_single(loss.mean())  # one loss per replica under DataParallel
        logits = need_logits(outputs, "the default loss")
        if temperature is not None:
            logits = logits * temperature
        return cross_entropy(logits, find_labels(batch), label_smoothing=label_smoothing)

    def logits(self, batch: Any) -> Tensor:
        """The live model's logits, in its current mode, in single precision or better."""
        return need_logits(self.call(batch), "logits")

    def score_logits(self, logits: Tensor, batch: Any) -> Tensor:
        """The metric's score of each sample, (n,), for logits from anywhere."""
        if self.metric == "accuracy":
            return accuracy(logits, find_labels(batch))
        if self.metric == "loss":
            if self.own_loss is None:
                return -sample_losses(at_least_single(logits), find_labels(batch))
            reason = "a loss of your own calls the model itself"
        else:
            try:
                return self._own_metric(logits, batch, logits.shape[0])[0]
            except TaskError:
                raise
            except Exception as error:
                reason = f"the metric does not take a tensor of logits ({type(error).__name__}: {error})"
        raise TaskError(
            describe(
                "score of averaged logits",
                expected="a metric that needs logits and labels only",
                found=reason,
                fix='use metric="accuracy", or a metric that also takes logits as outputs',
            )
        )

    def _own_metric(self, outputs: Any, batch: Any, n: int) -> tuple[Tensor, bool]:
        """Scores (n,), and whether they are one batch mean repeated."""
        assert callable(self.metric)
        values = torch.as_tensor(self.metric(outputs, batch)).detach()
        if values.ndim == 0:
            return values.expand(n), n > 1
        if values.shape != (n,):
            raise TaskError(
                describe(
                    "metric",
                    expected=f"one score per sample, shape ({n},), or a scalar mean over the batch",
                    found=f"shape {tuple(values.shape)}",
                    fix="return one number per sample from metric(outputs, batch)",
                )
            )
        return values, False

    def score_batch(self, batch: Any, n: int, with_loss: bool) -> tuple[Tensor, Tensor | None, bool]:
        """Scores (n,), mean loss if wanted, and whether the scores are one batch mean repeated."""
        if self.metric == "loss" and self.own_loss is not None:
            loss = self.loss(batch)
            return -loss.expand(n), loss, n > 1
        outputs = self.call(batch)
        known = find_loss(outputs) if isinstance(batch, Mapping) and self.own_loss is None else None
        if self.metric == "loss":
            if known is not None:
                loss = at_least_single(known.mean())
                return -loss.expand(n), loss, n > 1
            losses = sample_losses(need_logits(outputs, 'metric="loss"'), find_labels(batch))
            return -losses, losses.mean(), False
        if self.metric == "accuracy":
            values, repeated = accuracy(need_logits(outputs, 'metric="accuracy"'), find_labels(batch)), False
        else:
            values, repeated = self._own_metric(outputs, batch, n)
        if not with_loss:
            return values, None, repeated
        if self.own_loss is not None:
            return values, self.loss(batch), repeated
        if known is None:
            # With a metric of its own a model may have no loss we know; its absence is nan, not an error.
            logits, labels = find_logits(outputs), find_labels(batch)
            if logits is None or (self.metric != "accuracy" and not is_pair(logits, labels)):
                return values, None, repeated
            known = cross_entropy(at_least_single(logits), labels)
        return values, known.mean(), repeated
