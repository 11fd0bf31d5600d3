"""What can be known to be wrong before any long work starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stockpot.errors import DataError, TaskError, describe
from stockpot.task.classify import IGNORED

SHOWN = 8  # names listed in one message


class HasShape(Protocol):
    @property
    def shape(self) -> Any: ...


def check_labels(labels: Tensor, classes: int, name: str) -> None:
    """On the host: an accelerator would die of a bad label without saying which."""
    bad = ((labels < 0) | (labels >= classes)) & (labels != IGNORED)
    if not bad.any():
        return
    index = int(bad.nonzero()[0])
    fix = "number the classes from 0, or build the model with the right number of classes"
    if int(labels.min()) == 1 and int(labels.max()) == classes:
        fix = "these labels count from 1; subtract 1"
    raise DataError(
        describe(
            f"labels of {name}",
            expected=f"0 to {classes - 1} (the model has {classes} classes), or {IGNORED} to ignore a sample",
            found=f"{int(labels[index])} at index {index} "
            f"({int(bad.sum())} of {labels.numel()} are out of range)",
            fix=fix,
        )
    )


def check_scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.ndim != 0:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(
            describe(
                "loss",
                expected="a scalar tensor, the mean over the batch",
                found=found,
                fix="return loss.mean() from loss(model, batch)",
            )
        )
    return loss


def check_start(model: nn.Module, losses: list[Callable[[], Any]]) -> None:
    """The loss must be a finite scalar with a gradient; later ones are tried if the first has none."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    flags = [p.requires_grad for p in parameters]
    try:
        # Freezing during fine-tuning says nothing about mixing, so frozen parameters count here.
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            reached = any(_has_gradient(compute, parameters) for compute in losses)
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
    if not reached:
        raise _ignores_model("every parameter's gradient is None or exactly zero")


def _has_gradient(compute: Callable[[], Any], parameters: list[nn.Parameter]) -> bool:
    loss = check_scalar(compute())
    value = float(loss.detach())
    if not torch.isfinite(loss.detach()):
        raise TaskError(
            describe(
                "loss at the start",
                expected="a finite number",
                found=str(value),
                fix="check the checkpoints for NaN or Inf, the data, and the autocast dtype",
            )
        )
    if loss.grad_fn is None:
        raise _ignores_model("the loss has no gradient function")
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return any(g is not None and bool(g.any()) for g in gradients)


def _ignores_model(found: str) -> TaskError:
    return TaskError(
        describe(
            "loss",
            expected="a value that depends on the model's parameters",
            found=found,
            fix="call the given model inside loss(model, batch), without torch.no_grad() or .detach()",
        )
    )


def check_names(model: nn.Module, specs: Mapping[str, HasShape]) -> None:
    """The model must take exactly the pool's tensors, apart from tied names and counters."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    holds = state | dict(model.named_buffers(remove_duplicate=False))  # also buffers that are never saved
    lacks = [name for name in specs if name not in holds]
    given = {_place(state[name]) for name in specs if name in state}
    extra = [
        name
        for name, value in state.items()
        if name not in specs
        and not name.endswith("num_batches_tracked")
        and (value.numel() == 0 or _place(value) not in given)
    ]
    shapes = [
        f"{name}: model {tuple(holds[name].shape)}, pool {tuple(spec.shape)}"
        for name, spec in specs.items()
        if name in holds and tuple(holds[name].shape) != tuple(spec.shape)
    ]
    found = []
    if lacks:
        found.append(f"the model lacks {len(lacks)}: {_some(lacks)}")
    if extra:
        found.append(f"the model has {len(extra)} more: {_some(extra)}")
    if shapes:
        found.append(f"{len(shapes)} with other shapes: {_some(shapes, '; ')}")
    if found:
        raise TaskError(
            describe(
                f"model {type(model).__name__}",
                expected=f"the pool's {len(specs)} tensors",
                found=";\n  ".join(found),
                fix=_fix(lacks, extra, bool(shapes)),
            )
        )


def _place(value: Tensor) -> tuple[Any, ...]:
    return value.device, value.data_ptr(), tuple(value.shape), value.stride()


def _some(items: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + more


def _fix(lacks: list[str], extra: list[str], shapes: bool) -> str:
    if lacks and extra:
        first, known = lacks[0], set(extra)
        parts = first.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in known:
                prefix = ".".join(parts[:cut]) + "."
                return f"open the pool with rename={{'{prefix}': ''}} (in a recipe, pool.rename: {{{prefix}: ''}})"
        longer = next((name for name in extra if name.endswith(f".{first}")), None)
        if longer is not None:
            prefix = longer.removesuffix(first)
            return f'open the pool with rename=lambda name: "{prefix}" + name'
    if shapes and not lacks and not extra:
        return "build the model with the sizes it was fine-tuned with (number of classes, vocabulary)"
    return "build the model exactly as it was fine-tuned, or open the pool with rename= or key="
