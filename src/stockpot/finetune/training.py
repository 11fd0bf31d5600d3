"""One training run, of the head alone or of all weights: restartable at any step."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.finetune.augment import augment, mixed_loss
from stockpot.finetune.optimiser import Optimiser
from stockpot.finetune.plan import Plan, Probe, Trial
from stockpot.finetune.saved import Saved
from stockpot.signals import held
from stockpot.task import Data, Task

CHECKED = 64  # steps between looks at the losses; each look waits for the device

OnEpoch = Callable[[int, int, float], None]  # epochs done, of, mean loss


class DivergedError(Exception):
    """The loss or a weight stopped being a number. Caught by the trial, which is recorded as failed."""

    def __init__(self, what: str, step: int, steps: int, losses: list[float]) -> None:
        super().__init__(f"{what} at step {step + 1} of {steps}")
        self.step = step
        self.losses = losses


@dataclass
class Course:
    """Where a training run stands."""

    steps: int
    step: int = 0  # done
    losses: list[float] = field(default_factory=list)  # mean of each epoch
    open_sum: float = 0.0  # of the epoch in progress
    open_count: int = 0
    seconds: float = 0.0  # that earlier processes put into the steps done


def train(
    task: Task,
    data: Data,
    settings: Trial | Probe,
    plan: Plan,
    *,
    parameters: Iterable[nn.Parameter],
    saved: Saved | None = None,
    on_epoch: OnEpoch | None = None,
) -> Course:
    """Train in the model's current mode. What chance decides in a step depends on the seed and the step alone."""
    size = min(plan.batch_size, len(data))
    course = Course(max(1, round(settings.epochs * len(data) / size)))
    scaled = task.autocast == torch.float16 and task.device.type == "cuda"
    optimiser = Optimiser(parameters, settings.lr, settings.weight_decay, course.steps, plan, scaled=scaled)
    if saved is not None:
        _resume(task, course, optimiser, saved)
    began, last_save = time.perf_counter(), time.monotonic()
    unseen: list[Tensor] = []  # losses still on the device
    cuda = [task.device] if task.device.type == "cuda" else []
    with held() as stop, torch.random.fork_rng(devices=cuda), torch.enable_grad():
        while course.step < course.steps:
            unseen.append(_step(task, data, settings, plan, optimiser, course.step))
            course.step += 1
            ends = _epoch(course.step, size, len(data)) > _epoch(course.step - 1, size, len(data))
            ends |= course.step == course.steps
            if ends or stop.asked or len(unseen) == CHECKED:
                _look(course, unseen)
                unseen.clear()
            if ends:
                course.losses.append(course.open_sum / course.open_count)
                course.open_sum, course.open_count = 0.0, 0
                if on_epoch is not None:
                    total = max(len(course.losses), math.ceil(settings.epochs))
                    on_epoch(len(course.losses), total, course.losses[-1])
            due = stop.asked or (
                not unseen and saved is not None and time.monotonic() - last_save >= saved.interval
            )
            if due and saved is not None:
                _save(task, course, optimiser, saved, course.seconds + time.perf_counter() - began)
                last_save = time.monotonic()
            stop.obey()
    _check_weights(task.model, course)
    return course


def _step(
    task: Task, data: Data, settings: Trial | Probe, plan: Plan, optimiser: Optimiser, step: int
) -> Tensor:
    torch.manual_seed(_dropout_seed(settings.seed, step))
    batch = task.to_device(data.batch(data.order(settings.seed, step, plan.batch_size)))
    smoothing, mixed = 0.0, None
    if isinstance(settings, Trial):
        smoothing = settings.label_smoothing
        batch, mixed = augment(batch, settings.augmentation, plan.augmentation, seed=settings.seed, step=step)
    if mixed is None:
        loss = task.loss(batch, label_smoothing=smoothing).mean
    else:
        loss = mixed_loss(task, batch, *mixed, smoothing)
    optimiser.step(loss)
    return loss.detach()


def _dropout_seed(seed: int, step: int) -> int:
    key = hashlib.sha256(f"dropout/{seed}/{step}".encode()).digest()
    return int.from_bytes(key[:8], "little") >> 1


def _epoch(step: int, size: int, n: int) -> int:
    return step * size // n


def _look(course: Course, unseen: list[Tensor]) -> None:
    values = torch.stack(unseen).double().cpu()
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        first = int(bad[0])
        step = course.step - len(unseen) + first
        raise DivergedError(f"the loss became {float(values[first])}", step, course.steps, course.losses)
    for value in values.tolist():  # one after the other: the sum must not depend on when somebody looked
        course.open_sum += value
    course.open_count += len(unseen)


def _check_weights(model: nn.Module, course: Course) -> None:
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            raise DivergedError(f"{name} is not finite", course.steps - 1, course.steps, course.losses)


def _save(task: Task, course: Course, optimiser: Optimiser, saved: Saved, seconds: float) -> None:
    tensors, values = optimiser.state()
    whole = {f"optimizer.{name}": value for name, value in tensors.items()}
    for name, value in task.model.state_dict().items():
        if isinstance(value, Tensor):
            whole[f"model.{name}"] = value.detach().clone()
    progress: dict[str, Any] = {
        "step": course.step,
        "losses": course.losses,
        "open": [course.open_sum, course.open_count],
        "seconds": seconds,
    }
    saved.save(whole, {"optimizer": values, "course": progress})


def _resume(task: Task, course: Course, optimiser: Optimiser, saved: Saved) -> None:
    found = saved.load()
    if found is None:
        return
    tensors, values = found
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    task.model.load_state_dict(parts["model"], strict=False)
    optimiser.restore(parts["optimizer"], values["optimizer"])
    course.step, course.losses = values["course"]["step"], values["course"]["losses"]
    course.open_sum, course.open_count = values["course"]["open"]
    course.seconds = values["course"].get("seconds", 0.0)
