"""One trial: from the shared start to a checkpoint with its record."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from stockpot.errors import TaskError, describe
from stockpot.events import Event, Listener
from stockpot.finetune.record import TrialRecord, as_score, trial_name
from stockpot.finetune.training import DivergedError, train
from stockpot.finetune.weights import load_weights, weights_of, write_directory, write_file
from stockpot.finetune.workshop import Workshop
from stockpot.task import Scores
from stockpot.task.normalisation import modes_restored


def run_trial(workshop: Workshop, number: int, listen: Listener) -> TrialRecord:
    name, settings = trial_name(number), workshop.plan.trials[number]
    about = {"trial": name, "index": number}
    listen(Event("trial", {**about, "settings": dataclasses.asdict(settings)}))

    def on_epoch(done: int, total: int, loss: float) -> None:
        listen(Event("epoch", {**about, "epoch": done, "epochs": total, "loss": loss}))

    task = workshop.training_task()
    model = task.model
    load_weights(model, workshop.start)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise TaskError(
            describe(
                f"model {type(model).__name__}",
                expected="parameters to train",
                found="all of them frozen",
                fix="call requires_grad_(True) on those to be fine-tuned",
            )
        )
    saved = workshop.folder.saved(name, workshop.interval)
    began = time.perf_counter()
    scores: Scores | None = None
    failure: str | None = None
    earlier = 0.0
    try:
        with modes_restored(model):
            model.train()
            course = train(
                task,
                workshop.training_data,
                settings,
                workshop.plan,
                parameters=parameters,
                saved=saved,
                on_epoch=on_epoch,
            )
        steps, losses, earlier = course.steps, course.losses, course.seconds
        path: Path | None = _write(workshop, name)
        judge = workshop.validation_task()
        scores = None if judge is None else judge.score()
    except DivergedError as error:
        failure, path, steps, losses = str(error), None, error.step, error.losses
    record = TrialRecord(
        name=name,
        settings=settings,
        path=path,
        score=None if scores is None else as_score(scores),
        seconds=earlier + time.perf_counter() - began,
        steps=steps,
        losses=tuple(losses),
        failure=failure,
    )
    record.write(workshop.out)  # last: a trial with a record is a finished one
    saved.clear()
    listen(
        Event(
            "trial_done",
            {**about, "score": record.score, "seconds": record.seconds, "failure": record.failure},
        )
    )
    return record


def _write(workshop: Workshop, name: str) -> Path:
    if workshop.as_directories:
        path = workshop.out / name
        write_directory(path, workshop.model, workshop.companions)
    else:
        path = workshop.out / f"{name}.safetensors"
        write_file(path, weights_of(workshop.model), {"format": "pt"})
    return path
