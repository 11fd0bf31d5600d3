"""The user's world: a live model, how to judge it, and data."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from stockpot import ranks
from stockpot.errors import EnsembleError, TaskError
from stockpot.events import Listener, ignore, progress
from stockpot.names import differences, fill
from stockpot.task import checks
from stockpot.task import normalisation as stats
from stockpot.task.batches import on_device
from stockpot.task.data import MEMORY_LIMIT, Data, Sealed, forked_random
from stockpot.task.evaluator import Evaluator, Stop, on_host
from stockpot.task.judge import Judge
from stockpot.task.loss import Loss, LossFunction, TorchLoss
from stockpot.task.metric import Benchmark, Metric
from stockpot.task.metrics import MetricFunction, as_metric
from stockpot.task.scores import Scores
from stockpot.task.shards import called_as_a_whole, shard

SMALL = 8  # samples of a trial batch
MOST_OUTPUTS = 2**28  # numbers that a model returns for one batch that is scored: 1 GiB of logits in single precision
Statistics = Literal["recalibrate", "average", "copy"]


class Task:
    """A model, a loss, a metric where higher is better, data to fit on, and data for the final report.

    The default loss is cross-entropy of `model(x)` for batches `(x, y)`, and for dicts the loss that
    `model(**batch)` returns, or cross-entropy of its logits. A loss of your own is `loss(model, batch)`: one loss per
    sample, their mean, or a pair (sum, weight); or a loss of torch.nn, such as `nn.MSELoss()`. A metric is a name of
    `METRICS`, a function `metric(outputs, batch)` with one score per sample, or a `Metric`.
    `groups` and `report_groups` number or name what samples belong to (a patient, document or speaker): one per sample.
    The report data is checked here and then sealed: methods open it after their last decision (`Sealed`). A dict of
    data, such as `{"test": (x, y), "shifted": (x2, y2)}`, is several sets: all are scored, and the first one counts
    (`report_groups` is then a dict too).
    """

    def __init__(
        self,
        model: nn.Module,
        fit: Any,
        report: Any = None,
        *,
        groups: Any = None,
        report_groups: Any = None,
        loss: LossFunction | nn.Module | None = None,
        metric: str | Metric | MetricFunction = "accuracy",
        device: str | torch.device | None = None,
        autocast: torch.dtype | None = None,
        batch_size: int = 256,
        statistics: Statistics = "recalibrate",
        memory_limit: int = MEMORY_LIMIT,
        listen: Listener = ignore,
    ) -> None:
        checks.check_arguments(model, loss, metric, autocast, batch_size, statistics)
        self.device = checks.place(model, device)
        self.model = model
        self.autocast = autocast
        self.batch_size = batch_size
        self.statistics: Statistics = statistics
        read = partial(Data.of, memory_limit=memory_limit, listen=listen)
        self.fit = read(fit, name="fit data", groups=groups)
        of_torch = TorchLoss.of(loss, self._first(self.fit, 1))
        users_loss = None if isinstance(loss, nn.Module) else loss
        self._judge = Judge(model, users_loss, as_metric(metric), self.device, autocast, form=of_torch)
        self.evaluator = Evaluator(self._judge)
        self._check_data(self.fit)
        if loss is None and not self.has_statistics:  # then a batch says nothing that its parts do not
            self.batch_size = max(1, min(batch_size, MOST_OUTPUTS // self._judge.width))
        sets: dict[str, Data | Benchmark] = {}
        for key, (source, own_groups) in checks.report_sets(report, report_groups, fit).items():
            if isinstance(source, Benchmark):
                with self._asking():
                    source.check(model, autocast)
                sets[key] = source
                continue
            used = sum(one.nbytes for one in (self.fit, *sets.values()) if isinstance(one, Data))
            name = "report data" if key == checks.REPORT else f"report data {key!r}"
            data = sets[key] = read(source, name=name, groups=own_groups, memory_used=used)
            self._check_data(data)
        self._sealed = Sealed(sets)

    @property
    def metric(self) -> Metric:
        return self._judge.metric

    # Data ---------------------------------------------------------------------------------------------

    @property
    def has_report(self) -> bool:
        return bool(self._sealed.names)

    @property
    def report_names(self) -> list[str]:
        """The sets of report data; the first one counts."""
        return self._sealed.names

    @property
    def report_metrics(self) -> dict[str, Metric]:
        """Of each set of report data."""
        own = self._sealed.metrics()
        return {name: own.get(name, self.metric) for name in self.report_names}

    def check_may_decide(self, decision: str) -> None:
        """Refuse to learn or choose anything new once the report data has been looked at."""
        self._sealed.check_may_decide(decision)

    @cached_property
    def reports_on_fit(self) -> tuple[str, ...]:
        """The sets of report data that are the fitting data over again."""
        return self._sealed.equal(self.fit)

    def report_fingerprints(self) -> dict[str, str]:
        """Tells each set of report data from others, and nothing else about it."""
        return self._sealed.fingerprints()

    def to_device(self, batch: Any) -> Any:
        return on_device(batch, self.device)

    def _first(self, data: Data, size: int) -> Any:
        return self.to_device(data.batch(torch.arange(min(size, len(data)))))

    # Ranks --------------------------------------------------------------------------------------------

    @property
    def sharded(self) -> bool:
        """Whether ranks hold parts of the model."""
        return ranks.hold_parts(self.model)

    @property
    def shards(self) -> int:
        """How many ranks hold the model together."""
        mesh = getattr(next(self.model.parameters(), None), "device_mesh", None)
        return 1 if mesh is None else int(mesh.size())

    def shard(self, together: int | None = None) -> None:
        """Divide the model among so many ranks (default: all); it stays divided."""
        shard(self.model, self.device, together)

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

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """For a benchmark, which calls the model itself: as here, and other random numbers are left alone."""
        with self.evaluating(), forked_random(self.device) as reseed:
            reseed(0)
            yield

    # Judging one batch --------------------------------------------------------------------------------

    @property
    def can_scale_logits(self) -> bool:
        """Whether `loss` takes beta, as seen on the fitting data."""
        return self._judge.can_scale_logits

    def loss(self, batch: Any, *, label_smoothing: float = 0.0, beta: Tensor | None = None) -> Loss:
        """The live model's loss, in its current mode, on a batch on the device: a sum and its weight.

        `beta` multiplies the logits, as in Learned-Soup; see `can_scale_logits`.
        """
        return self._judge.loss(batch, label_smoothing=label_smoothing, beta=beta)

    def logits(self, batch: Any) -> Tensor:
        """The live model's logits, in its current mode, in single precision or better."""
        return self._judge.logits(batch)

    @cached_property
    def loss_adds_up(self) -> bool:
        """Whether the loss of a batch is that of its pieces together; tried on the live model and a few samples.

        In-batch (contrastive) losses do not, nor does a plain mean over uneven numbers of tokens: such a loss belongs
        to one batch size, so batches may not be cut and losses are compared at that size only.
        """

        def mean(seed: int, *pieces: Tensor) -> Tensor:
            reseed(seed)
            parts = [self.loss(self.to_device(self.fit.batch(piece))) for piece in pieces if len(piece)]
            totals, weights = (torch.stack(each).sum() for each in zip(*parts, strict=True))
            return totals / weights

        rows = torch.arange(min(SMALL, len(self.fit)))
        third = len(rows) // 3
        with self.evaluating(), forked_random(self.device) as reseed:
            whole, again, cut = mean(0, rows), mean(1, rows), mean(0, rows[:third], rows[third:])
        if not torch.isclose(whole, again, rtol=1e-3, equal_nan=True):
            return True  # it draws numbers of its own, so nothing can be seen
        return bool(torch.isclose(whole, cut, rtol=5e-3, atol=1e-5, equal_nan=True))

    @property
    def may_be_cut(self) -> bool:
        """Whether a batch in pieces teaches what the whole one does: normalisation over a batch sees only its piece."""
        return self.loss_adds_up and not self.has_statistics

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
        """The live model as it is; for means, `stop(sum of scores, samples done)` may end it after any batch."""
        if stop is not None and not self.metric.is_mean:
            raise TaskError.of("stop", "a metric that is a mean over samples", self.metric.name, "evaluate all samples")
        data = self.fit if data is None else data
        rows = torch.arange(len(data)) if indices is None else torch.as_tensor(indices, dtype=torch.long)
        grow = self.evaluator.is_fast and self.loss_adds_up

        def told(done: int) -> None:
            progress(listen, f"scoring {data.name}", done, rows.numel(), unit="samples")

        how: dict[str, Any] = {"with_loss": with_loss, "grow": grow}
        with self.evaluating():
            if ranks.active() and not (self.sharded and self.metric.calls_model):
                table, loss = self._table_of_all_ranks(data, rows, stop, told, how)
            else:
                table, loss = self.evaluator.table(data, rows, self.batch_size, stop=stop, told=told, **how)
        done = len(table)
        units = None if data.groups is None else data.groups[rows[:done]]
        return Scores(table, self.metric, float(loss.mean), done == rows.numel(), units)

    def score_report(self, one: Data | Benchmark, listen: Listener = ignore) -> Scores:
        """The live model on a set of report data; of a benchmark each rank computes all."""
        if isinstance(one, Data):
            return self.score(one, listen=listen)
        with self._asking():
            return Scores(one.table(self.model, autocast=self.autocast, listen=listen), one.metric)

    def _table_of_all_ranks(
        self, data: Data, rows: Tensor, stop: Stop | None, told: Callable[[int], None], how: Mapping[str, Any]
    ) -> tuple[Tensor, Loss]:
        """The same table, each rank having found a part of it; where it may be stopped, some batches at a time."""
        rounds = (rows,) if stop is None else rows.split(self.batch_size * ranks.size())  # type: ignore[no-untyped-call]
        tables: list[Tensor] = []
        losses: list[Loss] = []
        total, done = 0.0, 0
        for part in rounds:
            mine = ranks.stretch(part)
            found = self.evaluator.table(data, mine, self.batch_size, **how) if len(mine) else None
            batches = -(-len(part) // (self.batch_size * ranks.size())) - -(-len(mine) // self.batch_size)
            if self.sharded and batches:  # another rank makes one pass more, and needs this one's part of the model
                self.evaluator.table(data, part[:1], self.batch_size, **how)
            for table, loss in filter(None, ranks.gathered(found)):
                tables.append(table)
                losses.append(loss)
                total += float(table.sum())
            done += len(part)
            told(done)
            if stop is not None and stop(total, done):
                break
        return torch.cat(tables), Loss(*(torch.stack(each).sum() for each in zip(*losses, strict=True)))

    def ensemble_scores(self, members: Iterable[int], data: Data | None = None, *, listen: Listener = ignore) -> Scores:
        """The mean of several models' logits; each turn of `members` puts the next one into the model."""
        if own := list(self._sealed.metrics()):
            raise EnsembleError(f"report data {own[0]!r}, which calls the model itself")
        data = self.fit if data is None else data
        largest = max(len(data), self._sealed.largest)
        sums: list[Tensor] = []  # per batch, (n, C), on the host
        count, dtype = 0, torch.float32
        for count, _ in enumerate(members, start=1):
            with self.evaluating():
                for i, (part, logits) in enumerate(self.evaluator.logits(data, self.batch_size)):
                    dtype = logits.dtype
                    # Refused while methods decide, not when the report data is scored.
                    nbytes = logits.numel() // part.numel() * largest * 8
                    if nbytes > MEMORY_LIMIT and data is self.fit:
                        raise EnsembleError(
                            f"outputs of {nbytes / 2**30:.1f} GiB for all samples, more than"
                            f" {MEMORY_LIMIT / 2**30:.0f} GiB"
                        )
                    if count == 1:
                        sums.append(on_host(logits))
                    else:
                        sums[i] += on_host(logits)
            progress(listen, "scoring the ensemble", count, count, unit="models")
        parts = torch.arange(len(data)).split(self.batch_size)  # type: ignore[no-untyped-call]
        with self.evaluating():
            tables = [
                self._judge.statistics_of_logits(
                    (total / count).to(dtype).to(self.device), self.evaluator.batch(data, part)
                )
                for total, part in zip(sums, parts, strict=True)
            ]
        return Scores(torch.cat([on_host(table) for table in tables]), self.metric, units=data.groups)

    # Statistics of normalisation layers ---------------------------------------------------------------

    @property
    def has_statistics(self) -> bool:
        return bool(self.statistic_names)

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
        done = 0
        with stats.estimating(self.model) as next_is, forked_random(self.device) as reseed:
            for piece in rows.tensor_split(math.ceil(count / self.batch_size)):
                reseed(done)
                next_is(piece.numel())
                self._judge.forward(self.evaluator.batch(self.fit, piece))
                done += piece.numel()
                progress(listen, "recalibrating statistics", done, count, unit="samples")
        state = self.model.state_dict()
        return {name: state[name].detach().cpu().clone() for name in self.statistic_names}

    # Checks before long work --------------------------------------------------------------------------

    def _check_data(self, data: Data) -> None:
        checks.check_finite(data, labels=self._judge.users_loss is None)
        with self.evaluating():
            self._judge.try_batch(data, self._first(data, SMALL), first=data is self.fit)

    def check_loss(self) -> None:
        """One forward and backward pass; weights, gradients and modes stay as they were."""
        with self.learning(), called_as_a_whole() if self.sharded else nullcontext():
            # A loss such as a hinge can be flat on a few samples without ignoring the model; then more are tried.
            sizes = (SMALL, self.batch_size)
            checks.check_start(self.model, (self.loss(self._first(self.fit, size)) for size in sizes))

    # The pool's tensors -------------------------------------------------------------------------------

    def check_names(self, specs: Mapping[str, Any], without: Iterable[str] = (), spare: Collection[str] = ()) -> None:
        """The model must take exactly the pool's tensors (anything with a shape); tied names, counters and what is
        `spare` may lack."""
        if found := differences(self.model, specs, without, spare):
            raise TaskError.of(
                f"model {type(self.model).__name__}",
                expected=f"the pool's {len(specs)} tensors",
                found=";\n  ".join(found.sentences()),
                fix=found.fix(),
            )

    def load(self, tensors: Mapping[str, Tensor], spare: Collection[str] = ()) -> None:
        """Put a checkpoint into the model, as cooking does: also into buffers that the model itself never saves."""
        self.check_names(tensors, spare=spare)
        fill(self.model, tensors, tensors.items())


def open_report(task: Task, decisions: Iterable[str]) -> dict[str, Data | Benchmark]:
    """Break a task's seal to score these decisions, after the last of them was made; all sets of report data."""
    if not task.has_report:
        fix = "give Task(..., report=...) data that nothing was fitted on"
        raise TaskError.of("report scores", expected="a task with report data", found="none", fix=fix)
    return task._sealed.open(decisions)
