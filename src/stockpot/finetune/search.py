"""A whole search: probe, then every trial that has not finished yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.disk import require_space
from stockpot.errors import LearningError, MethodError, describe
from stockpot.events import Event, Listener, ignore
from stockpot.finetune.augment import check_mixup
from stockpot.finetune.head import find_head
from stockpot.finetune.parallel import run_parallel
from stockpot.finetune.plan import Plan
from stockpot.finetune.probe import run_probe
from stockpot.finetune.record import TrialRecord, read_record, trial_name
from stockpot.finetune.saved import INTERVAL
from stockpot.finetune.trial import run_trial
from stockpot.finetune.weights import load_weights, weights_of
from stockpot.finetune.workshop import Workshop
from stockpot.task import Data
from stockpot.task.loss import LossFunction
from stockpot.task.metrics import Metric, MetricFunction


def finetune(
    model: nn.Module,
    train: Any,
    fit: Any,
    out: str | Path,
    plan: Plan,
    *,
    loss: LossFunction | None = None,
    metric: str | Metric | MetricFunction = "accuracy",
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
    batch_size: int = 256,
    parallel: int = 1,
    start: Mapping[str, Tensor] | None = None,
    as_directories: bool = False,
    companions: str | Path | None = None,
    save_every: float = INTERVAL,
    listen: Listener = ignore,
) -> list[TrialRecord]:
    """Make a pool of checkpoints in `out`, one for each trial of the plan.

    `train` is what they learn from, `fit` (or None) what they are scored on; both as `Data.of` takes them. `start`
    replaces the model's own weights. Finished trials are not repeated and an unfinished one continues, with the
    same result on the same machine, processors divided the same way. With `parallel` > 1 that many processes train
    at once, and a script must keep its own work under `if __name__ == "__main__"`. `as_directories` writes Hugging
    Face folders, with the config and tokenizer files found in `companions`. Afterwards the model is as it was.
    """
    if isinstance(parallel, bool) or not isinstance(parallel, int) or parallel < 1:
        raise MethodError(
            describe("parallel", expected="a whole number of at least 1", found=repr(parallel), fix="use 1")
        )
    train = Data.of(train, name="training data", listen=listen)
    fit = None if fit is None else Data.of(fit, name="validation data", listen=listen)
    before = weights_of(model)
    if start is not None:
        load_weights(model, start)
    workshop = Workshop(
        model=model,
        train=train,
        fit=fit,
        plan=plan,
        out=Path(out).absolute(),
        loss=loss,
        metric=metric,
        device=device,
        autocast=autocast,
        batch_size=batch_size,
        as_directories=as_directories,
        companions=None if companions is None else Path(companions),
        interval=save_every,
        start={},
    )
    judge = {
        "loss": _name(loss),
        "metric": _name(metric),
        "autocast": None if autocast is None else str(autocast),
    }
    try:
        _check(workshop)
        with workshop.folder.locked():
            workshop.folder.claim(plan, train, fit, as_directories=as_directories, judge=judge)
            _check_room(workshop, parallel)
            workshop.start = _start(workshop, listen)
            records = _trials(workshop, parallel, listen)
    finally:
        load_weights(model, before)
    if all(record.failed for record in records):
        raise _all_failed(records)
    return records


def _check(workshop: Workshop) -> None:
    """What can be known to be wrong before hours are spent."""
    task = workshop.training_task()
    workshop.validation_task()
    plan = workshop.plan
    if plan.probe is not None:
        find_head(workshop.model, plan.head)
    sample = workshop.training_data.batch(torch.arange(1))
    if plan.augmentation.mixup and any(trial.augmentation for trial in plan.trials):
        check_mixup(sample, workshop.loss is not None)
    if workshop.loss is not None and any(trial.label_smoothing for trial in plan.trials):
        raise MethodError(
            describe(
                "label_smoothing",
                expected="0 with a loss of your own, whose logits are not known",
                found=str(max(trial.label_smoothing for trial in plan.trials)),
                fix="set label_smoothing to 0 and build it into loss(model, batch)",
            )
        )
    task.check_loss()


def _start(workshop: Workshop, listen: Listener) -> dict[str, Tensor]:
    folder, plan = workshop.folder, workshop.plan
    given, stored = weights_of(workshop.model), folder.start()
    if stored is not None:
        free = set(find_head(workshop.model, plan.head)) if plan.probe is not None else set()
        folder.check_start(given, stored, free)
        return stored
    if plan.probe is not None:
        run_probe(workshop, plan.probe, listen)
        given = weights_of(workshop.model)
    folder.write_start(given)
    return given


def _check_room(workshop: Workshop, parallel: int) -> None:
    """Checkpoints of the trials that are left, the start, and what unfinished trials save: weights and optimiser."""
    trials = range(len(workshop.plan.trials))
    left = sum(read_record(workshop.out, trial_name(number)) is None for number in trials)
    size = sum(value.numel() * value.element_size() for value in weights_of(workshop.model).values())
    states = 2 * 3 * min(parallel, left)  # the old one stays until the new one is whole
    require_space(
        workshop.out, (left + 1 + states) * size, f"{left} checkpoints and the state of unfinished trials"
    )


def _name(function: object) -> str | None:
    """How a loss or metric is called, which is all that can be compared of it."""
    if function is None or isinstance(function, str):
        return function
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _trials(workshop: Workshop, parallel: int, listen: Listener) -> list[TrialRecord]:
    names = [trial_name(number) for number in range(len(workshop.plan.trials))]
    done = {name: record for name in names if (record := read_record(workshop.out, name)) is not None}
    for name in done:
        workshop.folder.saved(
            name, workshop.interval
        ).clear()  # a kill may have come between the record and this
    listen(Event("finetune", {"trials": len(names), "done": len(done)}))
    open_numbers = [number for number, name in enumerate(names) if name not in done]
    if parallel > 1 and len(open_numbers) > 1:
        run_parallel(workshop, open_numbers, parallel, listen)
    else:
        for number in open_numbers:
            run_trial(workshop, number, listen)
    records = [read_record(workshop.out, name) for name in names]
    return [record for record in records if record is not None]


def _all_failed(records: list[TrialRecord]) -> LearningError:
    first = records[0]
    return LearningError(
        describe(
            f"all {len(records)} trials",
            expected="at least one that trains to the end",
            found=f"{first.name} (lr {first.settings.lr:g}): {first.failure}",
            fix="lower the learning rates, or check the data and the starting weights; remove the folder to try again",
        )
    )
