"""One training run, of the head alone or of all weights: restartable at any step, to the same bits."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.errors import RunError, TaskError
from stockpot.signals import held
from stockpot.task import Task
from stockpot.zoo.augment import augment, mixed_loss
from stockpot.zoo.folder import Saved
from stockpot.zoo.plan import Plan, Trial
from stockpot.zoo.weights import load_weights

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
    settings: Trial,
    plan: Plan,
    *,
    parameters: Iterable[nn.Parameter],
    saved: Saved | None = None,
    on_epoch: OnEpoch | None = None,
) -> Course:
    """Train the task's model on its data, in its current mode.

    What chance decides in a step depends on the seed and the step alone.
    """
    n = len(task.fit)
    size = min(plan.batch_size, n)
    course = Course(max(1, round(settings.epochs * n / size)))
    scaled = task.autocast == torch.float16 and task.device.type == "cuda"
    optimiser = Optimiser(parameters, settings, course.steps, plan, scaled=scaled)
    if saved is not None:
        course = _resume(task, course, optimiser, saved)
    began, last_save = time.perf_counter(), time.monotonic()
    unseen: list[Tensor] = []  # losses still on the device
    cuda = [task.device] if task.device.type == "cuda" else []
    with held() as stop, torch.random.fork_rng(devices=cuda), torch.enable_grad():
        while course.step < course.steps:
            unseen.append(_step(task, settings, plan, optimiser, course.step))
            course.step += 1
            ends = course.step * size // n > (course.step - 1) * size // n or course.step == course.steps
            if ends or stop.asked or len(unseen) == CHECKED:
                _look(course, unseen)
                unseen.clear()
            if ends:
                course.losses.append(course.open_sum / course.open_count)
                course.open_sum, course.open_count = 0.0, 0
                if on_epoch is not None:
                    total = max(len(course.losses), math.ceil(settings.epochs))
                    on_epoch(len(course.losses), total, course.losses[-1])
            if saved is not None and (stop.asked or (not unseen and time.monotonic() - last_save >= saved.interval)):
                _save(task, course, optimiser, saved, course.seconds + time.perf_counter() - began)
                last_save = time.monotonic()
            stop.obey()
    for name, value in task.model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            raise DivergedError(f"{name} is not finite", course.steps - 1, course.steps, course.losses)
    return course


def _step(task: Task, settings: Trial, plan: Plan, optimiser: Optimiser, step: int) -> Tensor:
    key = hashlib.sha256(f"dropout/{settings.seed}/{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(key[:8], "little") >> 1)
    batch = task.to_device(task.fit.batch(task.fit.order(settings.seed, step, plan.batch_size)))
    batch, mixed = augment(batch, settings.augmentation, plan.augmentation, seed=settings.seed, step=step)
    if mixed is None:
        loss = task.loss(batch, label_smoothing=settings.label_smoothing).mean
    else:
        loss = mixed_loss(task, batch, *mixed, settings.label_smoothing)
    optimiser.step(loss, step)
    return loss.detach()


def _look(course: Course, unseen: list[Tensor]) -> None:
    """Add the losses of the last steps to the epoch's sum, or say which was no number."""
    values = torch.stack(unseen).cpu().double()
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        first = int(bad[0])
        step = course.step - len(unseen) + first
        raise DivergedError(f"the loss became {float(values[first])}", step, course.steps, course.losses)
    for value in values.tolist():  # one after the other: the sum must not depend on when somebody looked
        course.open_sum += value
    course.open_count += len(unseen)


def _save(task: Task, course: Course, optimiser: Optimiser, saved: Saved, seconds: float) -> None:
    tensors, scaler = optimiser.state()
    whole = {f"optimizer.{name}": value for name, value in tensors.items()}
    whole |= {f"model.{name}": value for name, value in task.model.state_dict().items() if isinstance(value, Tensor)}
    saved.save(whole, {"scaler": scaler, "course": {**asdict(course), "seconds": seconds}})


def _resume(task: Task, course: Course, optimiser: Optimiser, saved: Saved) -> Course:
    found = saved.load()
    if found is None:
        return course
    tensors, values = found
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    try:
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        load_weights(task.model, parts["model"], subject="saved state")
        optimiser.restore(parts["optimizer"], values["scaler"])
        return Course(**values["course"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, TaskError) as error:
        raise RunError.of(
            str(saved.path),
            expected="the state of this trial",
            found=f"{type(error).__name__}: {error}",
            fix="remove the file, and the trial starts again",
        ) from error


class Optimiser:
    """AdamW or SGD; linear warm-up, then a cosine to zero; gradients clipped, and scaled for float16."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], settings: Trial, steps: int, plan: Plan, *, scaled: bool
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.steps, self.clip = settings.lr, steps, plan.clip
        self.warm = round(plan.warmup * steps)
        # Decay pulls matrices towards zero; biases and gains of norms have no business there.
        matrices, others = [p for p in self.parameters if p.ndim >= 2], [p for p in self.parameters if p.ndim < 2]
        pairs = ((matrices, settings.weight_decay), (others, 0.0))
        groups: list[dict[str, Any]] = [{"params": each, "weight_decay": decay} for each, decay in pairs if each]
        sgd = plan.optimizer == "sgd"
        self._optimizer = torch.optim.SGD(groups, momentum=0.9) if sgd else torch.optim.AdamW(groups)
        self._scaler = torch.amp.GradScaler(self.parameters[0].device.type, enabled=scaled)

    def rate(self, step: int) -> float:
        if step < self.warm:
            return self.lr * (step + 1) / (self.warm + 1)
        return self.lr * (1 + math.cos(math.pi * (step - self.warm) / (self.steps - self.warm))) / 2

    def step(self, loss: Tensor, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate(step)
        self._optimizer.zero_grad()
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What safetensors takes, and what JSON does."""
        entries = self._optimizer.state_dict()["state"].items()
        tensors = {
            f"{n}.{key}": value for n, each in entries for key, value in each.items() if isinstance(value, Tensor)
        }
        return tensors, self._scaler.state_dict()

    def restore(self, tensors: dict[str, Tensor], scaler: dict[str, Any]) -> None:
        saved = self._optimizer.state_dict()
        for name, tensor in tensors.items():
            number, key = name.split(".", 1)
            saved["state"].setdefault(int(number), {})[key] = tensor
        self._optimizer.load_state_dict(saved)
        self._scaler.load_state_dict(scaler)
