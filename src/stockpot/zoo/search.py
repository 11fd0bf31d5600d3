"""A whole search: the probe, then every trial that has not finished yet and that no other process has.

Start the same command several times, on one machine or on several over one folder: each process claims trials that
nobody holds, and the checkpoints are the same whoever makes them.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stockpot import files
from stockpot.errors import LearningError, MethodError, RunError, TaskError
from stockpot.events import Event, Listener, ignore
from stockpot.run.record import encode
from stockpot.task import Data, Metric, Task
from stockpot.task.data import fingerprint
from stockpot.task.loss import LossFunction
from stockpot.task.metrics import MetricFunction
from stockpot.task.normalisation import modes_restored
from stockpot.zoo.augment import check_mixup
from stockpot.zoo.folder import (
    INTERVAL,
    POLL,
    Folder,
    TrialRecord,
    load_weights,
    read_file,
    read_record,
    weights_of,
    write_directory,
    write_file,
)
from stockpot.zoo.plan import Plan
from stockpot.zoo.training import DivergedError, find_head, run_probe, train


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
    code: Mapping[str, str] | None = None,
    start: Mapping[str, Tensor] | None = None,
    as_directories: bool = False,
    companions: str | Path | None = None,
    save_every: float = INTERVAL,
    listen: Listener = ignore,
) -> list[TrialRecord]:
    """Make a pool of checkpoints in `out`, one for each trial of the plan.

    `train` is what they learn from, `fit` (or None) what they are scored on; both as `Data.of` takes them. `start`
    replaces the model's own weights. Finished trials are not repeated and an unfinished one continues, with the
    same result on the same kind of machine. Other processes that make the same call at the same time share the
    trials; all of them return when all trials are finished. A call that differs is refused with the difference:
    other settings, samples, labels or starting weights, and other `code`, the digests of the files that hold it.
    `as_directories` writes Hugging Face folders, with the config and tokenizer files found in `companions`.
    Afterwards the model is as it was.
    """
    data = Data.of(train, name="training data", listen=listen)
    held_out = None if fit is None else Data.of(fit, name="validation data", listen=listen)
    options: dict[str, Any] = {"loss": loss, "metric": metric, "device": device, "autocast": autocast}
    before = weights_of(model)
    try:
        if start is not None:
            load_weights(model, start)
        task = Task(model, data, batch_size=batch_size, **options)
        _check(task, plan, own_loss=loss is not None)
        judge = None if held_out is None else Task(model, held_out, batch_size=batch_size, **options)
        beside = None if companions is None else Path(companions)
        folder = Folder(Path(out).absolute(), len(plan.trials))
        search = Search(task, judge, plan, folder, as_directories, beside, save_every)
        with folder.prepared_alone(listen):
            judged = {"loss": _name(loss), "metric": _name(metric), "autocast": autocast and str(autocast)}
            identity: dict[str, Any] = {"as_directories": as_directories, "judge": judged, "code": dict(code or {})}
            for name, samples in (("train", data), ("fit", held_out)):
                identity[name] = None if samples is None else {"samples": len(samples), "content": fingerprint(samples)}
            folder.begin({"plan": json.loads(json.dumps(dataclasses.asdict(plan))), **identity})
            search.start = _start(search, listen)
        records = _run_trials(search, listen)
    finally:
        load_weights(model, before)
    if all(record.failed for record in records):
        expected, first = "at least one that trains to the end", records[0]
        found = f"{first.name} (lr {first.settings.lr:g}): {first.failure}"
        fix = "lower the learning rates, or check the data and the starting weights; remove the folder to try again"
        raise LearningError.of(f"all {len(records)} trials", expected=expected, found=found, fix=fix)
    return records


@dataclass
class Search:
    """Everything a trial needs. The tasks share one model; each trial begins by loading `start` into it."""

    task: Task  # with the data to train on
    judge: Task | None  # with the data to be scored on
    plan: Plan
    folder: Folder
    as_directories: bool
    companions: Path | None
    interval: float  # seconds between saves inside a trial
    start: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


def _check(task: Task, plan: Plan, *, own_loss: bool) -> None:
    """What can be known to be wrong before hours are spent."""
    if plan.probe is not None:
        find_head(task.model, plan.head)
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        model, fix = f"model {type(task.model).__name__}", "call requires_grad_(True) on those to be fine-tuned"
        raise TaskError.of(model, expected="parameters to train", found="all of them frozen", fix=fix)
    if plan.augmentation.mixup and any(trial.augmentation for trial in plan.trials):
        check_mixup(task.fit.batch(torch.arange(1)), own_loss)
    smoothing = max(trial.label_smoothing for trial in plan.trials)
    if own_loss and smoothing:
        expected = "0 with a loss of your own, whose logits are not known"
        fix = "set label_smoothing to 0 and build it into loss(model, batch)"
        raise MethodError.of("label_smoothing", expected=expected, found=str(smoothing), fix=fix)
    task.check_loss()


def _name(judge: object) -> str | None:
    """How a loss or metric is called, which is all that can be compared of it here; see `code`."""
    if judge is None or isinstance(judge, str):
        return judge
    own = judge.name if isinstance(judge, Metric) else getattr(judge, "__qualname__", type(judge).__qualname__)
    return str(own)


def _start(search: Search, listen: Listener) -> dict[str, Tensor]:
    """The weights every trial starts from: as given, with the head that the probe trains once for all processes."""
    folder, plan, model = search.folder, search.plan, search.task.model
    given = weights_of(model)
    # Checkpoints that are left, the start, and twice what a trial saves: the old one stays until the new one is whole.
    left = sum(read_record(folder.out, name) is None for name in folder.names)
    models = left + 1 + (6 if left else 0)
    what = f"{left} checkpoints and the state of unfinished trials"
    files.require_space(folder.out, models * sum(value.nbytes for value in given.values()), what)
    if not folder.start.exists():
        if plan.probe is not None:
            run_probe(search.task, plan, plan.probe, listen)
            given = weights_of(model)
        write_file(folder.start, given, {"format": "pt"}, folder.out)
        return given
    stored, _ = read_file(folder.start, folder.out)
    # The head may differ: it was made by chance, and the stored one is trained.
    free = set(find_head(model, plan.head)) if plan.probe is not None else set()
    names = [name for name in {**given, **stored} if name not in free]
    both = given.keys() & stored.keys()
    differing = [name for name in names if name not in both or not torch.equal(given[name], stored[name])]
    if differing:
        found = f"{len(differing)} of {len(stored)} tensors differ, such as {differing[0]}"
        fix = "start from the same weights (seed a random model before it is built), or choose another folder"
        raise RunError.of(str(folder.out), "the starting weights of the search that was begun here", found, fix)
    return stored


def _run_trials(search: Search, listen: Listener) -> list[TrialRecord]:
    """Run what nobody else runs, then wait for the others; what a dead one leaves is taken over."""
    folder = search.folder
    done = {name: record for name in folder.names if (record := read_record(folder.out, name)) is not None}
    for name in done:
        folder.saved(name).clear()  # a kill may have come between the record and this
    listen(Event("finetune", {"trials": len(folder.names), "done": len(done)}))
    told = False
    while True:
        for number, name in enumerate(folder.names):
            if name in done:
                continue
            with folder.claimed(name) as ours:
                if ours:  # looked at again: another process may just have finished it
                    found = read_record(folder.out, name)
                    done[name] = _run_trial(search, number, listen) if found is None else found
        waiting = [name for name in folder.names if name not in done]
        if not waiting:
            return [done[name] for name in folder.names]
        if not told:
            listen(Event("waiting", {"trials": waiting}))
            told = True
        time.sleep(POLL)


def _run_trial(search: Search, number: int, listen: Listener) -> TrialRecord:
    """One trial, from the shared start to a checkpoint with its record."""
    folder, task, plan = search.folder, search.task, search.plan
    name, settings = folder.names[number], plan.trials[number]
    about = {"trial": name, "index": number}
    listen(Event("trial", {**about, "settings": dataclasses.asdict(settings)}))
    load_weights(task.model, search.start)
    parameters = [p for p in task.model.parameters() if p.requires_grad]
    saved = folder.saved(name, search.interval)
    began, path, score, failure = time.perf_counter(), None, None, None
    try:
        with modes_restored(task.model):
            task.model.train()
            course = train(task, settings, plan, parameters=parameters, saved=saved, about=about, listen=listen)
        path = _write(search, name)
        score = encode(None if search.judge is None else search.judge.score())
    except DivergedError as error:
        course, failure = error.course, str(error)
    seconds = course.seconds + time.perf_counter() - began
    record = TrialRecord(name, settings, path, score, seconds, course.step, tuple(course.losses), failure)
    record.write(folder.out)  # last: a trial with a record is a finished one
    saved.clear()
    listen(Event("trial_done", {**about, "score": score, "seconds": seconds, "failure": failure}))
    return record


def _write(search: Search, name: str) -> Path:
    out, model = search.folder.out, search.task.model
    path = out / name if search.as_directories else out / f"{name}.safetensors"
    if search.as_directories:
        write_directory(path, model, search.companions, out)
    else:
        write_file(path, weights_of(model), {"format": "pt"}, out)
    return path
