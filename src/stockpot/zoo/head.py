"""The head of a model: which parameters it is, and its training alone.

The linear probe trains the head before all trials, so that they do not start by unlearning the encoder.
"""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from torch import nn

from stockpot.errors import LearningError, TaskError
from stockpot.events import Event, Listener
from stockpot.task import Task
from stockpot.task.normalisation import modes_restored
from stockpot.zoo.plan import Plan, Probe
from stockpot.zoo.training import DivergedError, train


def find_head(model: nn.Module, pattern: str | None) -> tuple[str, ...]:
    """Names of the head's parameters: those the pattern, name or prefix fits, or the last linear layer's."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a head may be tied
    if pattern is None:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise TaskError.of(
                f"head of {type(model).__name__}",
                expected="a linear layer, as the last of the model",
                found="none",
                fix="name the head's parameters, or train without a probe",
            )
        return tuple(name for name in (f"{linear[-1]}.weight", f"{linear[-1]}.bias") if name in names)
    prefix = pattern.rstrip(".")
    found = tuple(n for n in names if n == prefix or n.startswith(f"{prefix}.") or fnmatchcase(n, pattern))
    if not found:
        places = sorted({name.rpartition(".")[0] or name for name in names})
        close = difflib.get_close_matches(prefix.removesuffix(".*"), places, n=3, cutoff=0.4)
        last = f"the last ones are {', '.join(names[-3:])}"
        raise TaskError.of(
            f"head {pattern!r}",
            expected=f"a name, prefix or pattern of parameters of {type(model).__name__}",
            found="none that fit",
            fix=f"did you mean {' or '.join(close)}" if close else last,
        )
    return found


def run_probe(task: Task, plan: Plan, probe: Probe, listen: Listener) -> None:
    """Leaves the trained head in the task's model."""
    model = task.model
    head = set(find_head(model, plan.head))
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
            course = train(task, probe.as_trial(), plan, parameters=chosen, on_epoch=on_epoch)
    except DivergedError as error:
        raise LearningError.of(
            "linear probe",
            expected="a finite loss",
            found=str(error),
            fix="lower the learning rate of the probe, or check the data and the starting weights",
        ) from error
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    listen(Event("probe_done", {"loss": course.losses[-1], "steps": course.steps}))
