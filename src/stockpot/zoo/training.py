"""One training run, of the head alone or of all weights: restartable at any step, to the same bits.

The head is trained alone by the linear probe before all trials, so that they do not start by unlearning the encoder.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.errors import LearningError, RunError, TaskError
from stockpot.events import Event, Listener, ignore
from stockpot.signals import held
from stockpot.task import Task
from stockpot.task.normalisation import modes_restored
from stockpot.zoo.augment import augment, mixed_loss
from stockpot.zoo.folder import Saved, load_weights
from stockpot.zoo.plan import Plan, Probe, Trial

CHECKED = 64  # steps between looks at the losses; each look waits for the device


@dataclass
class Course:
    """Where a training run stands."""

    steps: int
    step: int = 0  # done
    losses: list[float] = field(default_factory=list)  # mean of each epoch
    open_sum: float = 0.0  # of the epoch in progress
    open_count: int = 0
    seconds: float = 0.0  # that earlier processes put into the steps done


class DivergedError(Exception):
    """The loss or a weight stopped being a number. Caught by the trial, which is recorded as failed."""

    def __init__(self, what: str, course: Course) -> None:
        super().__init__(f"{what} at step {course.step + 1} of {course.steps}")
        self.course = course


def train(
    task: Task,
    settings: Trial,
    plan: Plan,
    *,
    parameters: Iterable[nn.Parameter],
    about: Mapping[str, Any],
    saved: Saved | None = None,
    listen: Listener = ignore,
) -> Course:
    """Train the task's model on its data, in its current mode; `about` is what events say of it.

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
                done = len(course.losses)
                total = max(done, math.ceil(settings.epochs))
                listen(Event("epoch", {**about, "epoch": done, "epochs": total, "loss": course.losses[-1]}))
            if saved is not None and (stop.asked or (not unseen and time.monotonic() - last_save >= saved.interval)):
                _save(task, course, optimiser, saved, course.seconds + time.perf_counter() - began)
                last_save = time.monotonic()
            stop.obey()
    for name, value in task.model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
            course.step -= 1
            raise DivergedError(f"{name} is not finite", course)
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
        course.step += first - len(unseen)
        raise DivergedError(f"the loss became {float(values[first])}", course)
    for value in values.tolist():  # one after the other: the sum must not depend on when somebody looked
        course.open_sum += value
    course.open_count += len(unseen)


def _save(task: Task, course: Course, optimiser: Optimiser, saved: Saved, seconds: float) -> None:
    model = {f"model.{name}": value for name, value in task.model.state_dict().items()}
    values = {"scaler": optimiser.scaler.state_dict(), "course": {**asdict(course), "seconds": seconds}}
    saved.save({**model, **optimiser.tensors()}, values)


def _resume(task: Task, course: Course, optimiser: Optimiser, saved: Saved) -> Course:
    found = saved.load()
    if found is None:
        return course
    tensors, values = found
    try:
        model = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        load_weights(task.model, model, subject="saved state")
        optimiser.restore(tensors, values["scaler"])
        return Course(**values["course"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, TaskError) as error:
        said, fix = f"{type(error).__name__}: {error}", "remove the file, and the trial starts again"
        raise RunError.of(str(saved.path), expected="the state of this trial", found=said, fix=fix) from error


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
        self.scaler = torch.amp.GradScaler(self.parameters[0].device.type, enabled=scaled)

    def rate(self, step: int) -> float:
        if step < self.warm:
            return self.lr * (step + 1) / (self.warm + 1)
        return self.lr * (1 + math.cos(math.pi * (step - self.warm) / (self.steps - self.warm))) / 2

    def step(self, loss: Tensor, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate(step)
        self._optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            self.scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.scaler.step(self._optimizer)
        self.scaler.update()

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers of each parameter; the scaler has a few numbers more."""
        state = self._optimizer.state_dict()["state"]
        return {f"optimizer.{number}.{key}": value for number, each in state.items() for key, value in each.items()}

    def restore(self, tensors: Mapping[str, Tensor], scaler: dict[str, Any]) -> None:
        saved = self._optimizer.state_dict()
        for name in (name for name in tensors if name.startswith("optimizer.")):
            _, number, key = name.split(".", 2)
            saved["state"].setdefault(int(number), {})[key] = tensors[name]
        self._optimizer.load_state_dict(saved)
        self.scaler.load_state_dict(scaler)


# The head ---------------------------------------------------------------------------------------------


def find_head(model: nn.Module, pattern: str | None) -> tuple[str, ...]:
    """Names of the head's parameters: those the pattern, name or prefix fits, or the last linear layer's."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a head may be tied
    if pattern is None:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            expected = "a linear layer, as the last of the model"
            fix = "name the head's parameters, or train without a probe"
            raise TaskError.of(f"head of {type(model).__name__}", expected, "none", fix)
        return tuple(name for name in (f"{linear[-1]}.weight", f"{linear[-1]}.bias") if name in names)
    prefix = pattern.rstrip(".")
    found = tuple(n for n in names if n == prefix or n.startswith(f"{prefix}.") or fnmatchcase(n, pattern))
    if not found:
        places = sorted({name.rpartition(".")[0] or name for name in names})
        close = difflib.get_close_matches(prefix.removesuffix(".*"), places, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(close)}" if close else f"the last ones are {', '.join(names[-3:])}"
        expected = f"a name, prefix or pattern of parameters of {type(model).__name__}"
        raise TaskError.of(f"head {pattern!r}", expected=expected, found="none that fit", fix=fix)
    return found


def run_probe(task: Task, plan: Plan, probe: Probe, listen: Listener) -> None:
    """Leaves the trained head in the task's model."""
    model, head = task.model, set(find_head(task.model, plan.head))
    every = list(model.named_parameters(remove_duplicate=False))
    flags = [(parameter, parameter.requires_grad) for _, parameter in every]
    listen(Event("probe", {"parameters": sorted(head), "epochs": probe.epochs}))
    try:
        with modes_restored(model):
            model.eval().requires_grad_(False)  # dropout off and statistics untouched: the encoder is not being trained
            # After all are off, because a parameter with two names may be in the head and elsewhere.
            chosen = list({id(p): p for name, p in every if name in head}.values())
            for parameter in chosen:
                parameter.requires_grad_(True)
            settings, about = Trial(**asdict(probe)), {"trial": "probe"}
            course = train(task, settings, plan, parameters=chosen, about=about, listen=listen)
    except DivergedError as error:
        fix = "lower the learning rate of the probe, or check the data and the starting weights"
        raise LearningError.of("linear probe", expected="a finite loss", found=str(error), fix=fix) from error
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    listen(Event("probe_done", {"loss": course.losses[-1], "steps": course.steps}))
