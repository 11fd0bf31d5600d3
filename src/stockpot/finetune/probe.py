"""The linear probe: the head is trained alone, so that trials do not start by unlearning the encoder."""

from __future__ import annotations

from stockpot.errors import LearningError, describe
from stockpot.events import Event, Listener
from stockpot.finetune.head import find_head
from stockpot.finetune.plan import Probe
from stockpot.finetune.training import DivergedError, train
from stockpot.finetune.workshop import Workshop
from stockpot.task.normalisation import modes_restored


def run_probe(workshop: Workshop, probe: Probe, listen: Listener) -> None:
    """Leaves the trained head in the workshop's model."""
    task = workshop.training_task()
    model = task.model
    head = set(find_head(model, workshop.plan.head))
    every = list(model.named_parameters(remove_duplicate=False))
    flags = [(parameter, parameter.requires_grad) for _, parameter in every]
    listen(Event("probe", {"parameters": sorted(head), "epochs": probe.epochs}))

    def on_epoch(done: int, total: int, loss: float) -> None:
        listen(Event("epoch", {"trial": "probe", "epoch": done, "epochs": total, "loss": loss}))

    try:
        with modes_restored(model):
            model.eval()  # dropout off and statistics untouched: the encoder is not being trained
            # First all off, then the head on: a parameter with two names may be in both lists.
            for _, parameter in every:
                parameter.requires_grad_(False)
            chosen = list({id(p): p for name, p in every if name in head}.values())
            for parameter in chosen:
                parameter.requires_grad_(True)
            course = train(
                task, workshop.training_data, probe, workshop.plan, parameters=chosen, on_epoch=on_epoch
            )
    except DivergedError as error:
        raise LearningError(
            describe(
                "linear probe",
                expected="a finite loss",
                found=str(error),
                fix="lower the learning rate of the probe, or check the data and the starting weights",
            )
        ) from error
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    listen(Event("probe_done", {"loss": course.losses[-1], "steps": course.steps}))
