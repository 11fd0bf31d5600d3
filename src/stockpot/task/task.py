"""The user's world: a live model, how to judge it, and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from stockpot.errors import TaskError, describe
from stockpot.events import Listener, ignore, progress
from stockpot.task import checks
from stockpot.task import statistics as stats
from stockpot.task.arguments import check_arguments, place
from stockpot.task.classify import check_pair, is_pair
from stockpot.task.data import MEMORY_LIMIT, Data
from stockpot.task.fingerprint import fingerprint
from stockpot.task.finite import check_finite
from stockpot.task.judge import Judge, Loss, Metric
from stockpot.task.outputs import at_least_single, find_labels, find_logits, need_logits, with_blank_labels
from stockpot.task.scores import Scores
from stockpot.task.sealed import Sealed
from stockpot.task.tree import map_tensors

Stop = Callable[[float, int], bool]
Statistics = Literal["recalibrate", "average", "copy"]

SMALL = 8  # samples of a trial batch


class Task:
    """A model, a loss, a metric where higher is better, data to fit on, and data for the final report.

    The default loss is cross-entropy of `model(x)` for batches `(x, y)`, and for dicts the loss that
    `model(**batch)` returns, or cross-entropy of its logits. A loss of your own is `loss(model, batch)`, the
    mean over the batch; a metric of your own is `metric(outputs, batch)`, one score per sample or their mean.
    The report data is checked here and then sealed: methods open it after their last decision (task/sealed.py).
    """

    def __init__(
        self,
        model: nn.Module,
        fit: Any,
        report: Any = None,
        *,
        loss: Loss | None = None,
        metric: str | Metric = "accuracy",
        device: str | torch.device | None = None,
        autocast: torch.dtype | None = None,
        batch_size: int = 256,
        statistics: Statistics = "recalibrate",
        memory_limit: int = MEMORY_LIMIT,
        workers: int = 0,
        listen: Listener = ignore,
    ) -> None:
        check_arguments(model, loss, metric, autocast, batch_size, statistics)
        self.device = place(model, device)
        self.model = model
        self.autocast = autocast
        self.batch_size = batch_size
        self.metric = metric
        self.metric_max: float | None = 1.0 if metric == "accuracy" else None
        self.statistics: Statistics = statistics
        self._judge = Judge(self.model, loss, metric, self.device, autocast)
        self.fit = Data.of(fit, name="fit data", memory_limit=memory_limit, workers=workers, listen=listen)
        self._check_data(self.fit)
        self._sealed: Sealed | None = None
        if report is not None:
            data = Data.of(
                report,
                name="report data",
                memory_limit=memory_limit,
                memory_used=self.fit.nbytes,
                workers=workers,
                listen=listen,
            )
            self._check_data(data)
            self._sealed = Sealed(data)

    # Data ---------------------------------------------------------------------------------------------

    @property
    def has_report(self) -> bool:
        return self._sealed is not None

    def check_may_decide(self, decision: str) -> None:
        """Refuse to learn or choose anything new once the report data has been looked at."""
        if self._sealed is not None:
            self._sealed.check_may_decide(decision)

    @cached_property
    def reports_on_fit(self) -> bool:
        """Whether the report data is the fitting data over again."""
        as_many = self._sealed is not None and len(self._sealed) == len(self.fit)
        return as_many and self.report_fingerprint() == fingerprint(self.fit)

    def report_fingerprint(self) -> str | None:
        """Tells one set of report data from another, and nothing else about it."""
        return None if self._sealed is None else self._sealed.fingerprint()

    def to_device(self, batch: Any) -> Any:
        return map_tensors(lambda leaf: leaf.to(self.device, non_blocking=True), batch)

    # Modes --------------------------------------------------------------------------------------------

    def learning(self) -> AbstractContextManager[None]:
        """Dropout off, normalisation by batch statistics, buffers untouched; all restored on exit."""
        return stats.batch_statistics(self.model)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; modes restored on exit."""
        # Not inference_mode: tensors a model caches there could not be used while learning.
        with stats.modes_restored(self.model), torch.no_grad():
            self.model.eval()
            yield

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Call the model through torch.compile; its parameters and modes stay the model's own."""
        before = self._judge.model
        self._judge.model = cast(nn.Module, torch.compile(before, dynamic=False))
        try:
            yield
        finally:
            self._judge.model = before

    # Judging one batch --------------------------------------------------------------------------------

    def loss(self, batch: Any, *, label_smoothing: float = 0.0, temperature: Tensor | None = None) -> Tensor:
        """Mean loss of the live model, in its current mode, on a batch on the device.

        `temperature` multiplies the logits, as in Learned-Soup.
        """
        return self._judge.loss(batch, label_smoothing=label_smoothing, temperature=temperature)

    def logits(self, batch: Any) -> Tensor:
        """The live model's logits, in its current mode, in single precision or better."""
        return self._judge.logits(batch)

    def scoring_logits(self, logits: Tensor, batch: Any) -> Tensor:
        """The metric's score of each sample, (n,), for logits from anywhere."""
        return self._judge.score_logits(logits, batch)

    # Evaluation ---------------------------------------------------------------------------------------

    def score(
        self,
        data: Data | None = None,
        *,
        indices: Tensor | None = None,
        stop: Stop | None = None,
        with_loss: bool = True,
        listen: Listener = ignore,
    ) -> Scores:
        """The live model as it is; `stop(sum of scores, samples done)` may end it after any batch."""
        return self._evaluate(self.fit if data is None else data, indices, stop, with_loss, listen)

    def _evaluate(
        self, data: Data, indices: Tensor | None, stop: Stop | None, with_loss: bool, listen: Listener
    ) -> Scores:
        rows = torch.arange(len(data)) if indices is None else torch.as_tensor(indices, dtype=torch.long)
        values: list[Tensor] = []
        losses: list[Tensor] = []
        sizes: list[int] = []
        total, done, per_batch = 0.0, 0, False
        with self.evaluating():
            for part in torch.split(rows, self.batch_size):
                n = part.numel()
                score, loss, repeated = self._judge.score_batch(
                    self.to_device(data.batch(part)), n, with_loss
                )
                values.append(score)
                losses += [] if loss is None else [at_least_single(loss) * n]
                sizes.append(n)
                done += n
                per_batch |= repeated
                progress(listen, f"scoring {data.name}", done, rows.numel(), unit="samples")
                if stop is not None:  # only then is it worth waiting for the device
                    total += float(score.cpu().double().sum())
                    if stop(total, done):
                        break
        return Scores(
            values=torch.cat(values).cpu().double(),
            loss=float(torch.stack(losses).cpu().double().sum()) / done if losses else math.nan,
            complete=done == rows.numel(),
            batches=tuple(sizes) if per_batch else None,
        )

    def ensemble_scores(
        self, members: Iterable[int], data: Data | None = None, *, listen: Listener = ignore
    ) -> Scores:
        """The mean of several models' logits; each turn of `members` puts the next one into the model."""
        data = self.fit if data is None else data
        parts = torch.split(torch.arange(len(data)), self.batch_size)
        sums: list[Tensor] = []  # per batch, (n, C), on the host
        count = 0
        for _ in members:
            with self.evaluating():
                for i, part in enumerate(parts):
                    logits = self.logits(self.to_device(data.batch(part))).double().cpu()
                    if count == 0:
                        sums.append(logits)
                    else:
                        sums[i] += logits
            count += 1
            progress(listen, "scoring the ensemble", count, count, unit="models")
        values = [
            self.scoring_logits((total / count).to(self.device), self.to_device(data.batch(part)))
            for total, part in zip(sums, parts, strict=True)
        ]
        return Scores(values=torch.cat(values).cpu().double())

    # Statistics of normalisation layers ---------------------------------------------------------------

    @property
    def has_statistics(self) -> bool:
        return bool(stats.statistic_layers(self.model))

    @property
    def statistic_names(self) -> tuple[str, ...]:
        return stats.statistic_names(self.model)

    def recalibrate(self, listen: Listener = ignore, limit: int | None = None) -> dict[str, Tensor]:
        """Estimate running statistics again over the fitting data, at most `limit` samples of it.

        They stay in the model; copies on the host come back.
        """
        if not self.has_statistics:
            return {}
        n = len(self.fit)
        count = n if limit is None else max(1, min(limit, n))
        # Shuffled by a fixed seed: in sorted data a batch's variance would be that of one class. Pieces of
        # even size: a last batch of one sample has no variance.
        rows = self.fit.order(0, 0, n)[:count]
        pieces = rows.tensor_split(math.ceil(count / self.batch_size))

        def batches() -> Iterator[tuple[Any, int]]:
            done = 0
            for piece in pieces:
                yield self.to_device(self.fit.batch(piece)), piece.numel()
                done += piece.numel()
                progress(listen, "recalibrating statistics", done, count, unit="samples")

        return stats.recalibrate(self.model, batches(), self._judge.forward)

    # Checks before long work --------------------------------------------------------------------------

    def _check_data(self, data: Data) -> None:
        """Bad numbers, labels outside the model's classes, and a model that cannot be called or judged at all."""
        check_finite(data, labels=self._judge.own_loss is None)
        batch = self.to_device(with_blank_labels(data.batch(torch.arange(min(SMALL, len(data))))))
        try:
            with self.evaluating():
                outputs = self._judge.call(batch)
        except TaskError:
            if self._judge.own_loss is None:
                raise
            return
        except Exception as error:
            if self._judge.own_loss is not None:
                return  # only the user's loss knows how to call this model
            raise TaskError(
                describe(
                    f"model {type(self.model).__name__}",
                    expected=f"a model that can be called on a batch of the {data.name}",
                    found=f"{type(error).__name__}: {error}",
                    fix="make batches (inputs, labels) or dicts of keyword arguments, or give loss=",
                )
            ) from error
        logits, labels = find_logits(outputs), find_labels(batch)
        if self.metric == "accuracy" and self._judge.own_loss is None:
            check_pair(need_logits(outputs, 'metric="accuracy"'), labels, 'metric="accuracy"')
        if data.labels is None or logits is None or not is_pair(logits, labels):
            return
        judged = self.metric == "accuracy" or self._judge.own_loss is None
        regression = isinstance(batch, Mapping) and logits.shape[1] == 1  # such models bring their own loss
        if judged and not regression:
            checks.check_labels(data.labels, logits.shape[1], data.name)

    def check_loss(self) -> None:
        """One forward and backward pass; weights, gradients and modes stay as they were."""

        def on(size: int) -> Callable[[], Tensor]:
            return lambda: self.loss(self.to_device(self.fit.batch(torch.arange(min(size, len(self.fit))))))

        with self.learning():
            # A loss such as a hinge can be flat on a few samples without ignoring the model.
            checks.check_start(self.model, [on(SMALL), on(self.batch_size)])

    def check_names(self, specs: Mapping[str, checks.HasShape]) -> None:
        """Whether the model takes exactly the tensors of a pool."""
        checks.check_names(self.model, specs)
