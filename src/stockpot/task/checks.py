"""What can be known to be wrong before any long work starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stockpot.errors import DataError, TaskError, describe
from stockpot.task.classify import IGNORED
from stockpot.task.renaming import in_yaml, left_over, suggest_rename

SHOWN = 8  # names listed in one message


class HasShape(Protocol):
    @property
    def shape(self) -> Any: ...


def check_labels(labels: Tensor, classes: int, name: str) -> None:
    """Of single samples, on the host: an accelerator would die of a bad label without saying which.

    What torch ignores in a loss is refused too: a sample without a label has no score, and none is not zero.
    """
    bad = (labels < 0) | (labels >= classes)
    if not bad.any():
        return
    index = int(bad.nonzero()[0])
    fix = "number the classes from 0, or build the model with the right number of classes"
    if int(labels.min()) == 1 and int(labels.max()) == classes:
        fix = "these labels count from 1; subtract 1"
    elif bool((labels[bad] == IGNORED).all()):
        fix = f"leave samples without a label ({IGNORED}) out of the data"
    raise DataError(
        describe(
            f"labels of {name}",
            expected=f"0 to {classes - 1} (the model has {classes} classes)",
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


@dataclass(frozen=True)
class Differences:
    """How a model and a pool differ, apart from tied names and counters. Empty when they fit."""

    lacks: tuple[str, ...]  # in the pool, not in the model
    extra: tuple[str, ...]  # in the model, not in the pool
    shapes: tuple[str, ...]  # in both with other shapes, said in words
    rename: dict[str, str] | None  # prefixes, old to new, that would help
    left_over: int = 0  # tensors of the pool that would still have no place then

    def __bool__(self) -> bool:
        return bool(self.lacks or self.extra or self.shapes)

    def sentences(self) -> list[str]:
        found = []
        if self.lacks:
            found.append(f"the model lacks {len(self.lacks)}: {_some(self.lacks)}")
        if self.extra:
            found.append(f"the model has {len(self.extra)} more: {_some(self.extra)}")
        if self.shapes:
            found.append(f"{len(self.shapes)} with other shapes: {_some(self.shapes, '; ')}")
        return found

    def fix(self) -> str:
        if self.rename is not None:
            prefixes = in_yaml(self.rename)
            rest = f"; {self.left_over} would still not fit" if self.left_over else ""
            return f"open the pool with rename={prefixes} (in a recipe, pool.rename: {prefixes}){rest}"
        if self.shapes and not self.lacks and not self.extra:
            return "build the model with the sizes it was fine-tuned with (number of classes, vocabulary)"
        return "build the model exactly as it was fine-tuned, or open the pool with rename= or key="


def check_names(model: nn.Module, specs: Mapping[str, HasShape]) -> None:
    """The model must take exactly the pool's tensors, apart from tied names and counters."""
    found = differences(model, specs)
    if found:
        raise TaskError(
            describe(
                f"model {type(model).__name__}",
                expected=f"the pool's {len(specs)} tensors",
                found=";\n  ".join(found.sentences()),
                fix=found.fix(),
            )
        )


def differences(model: nn.Module, specs: Mapping[str, HasShape]) -> Differences:
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    holds = state | dict(model.named_buffers(remove_duplicate=False))  # also buffers that are never saved
    lacks = tuple(name for name in specs if name not in holds)
    given = {_place(state[name]) for name in specs if name in state}
    extra = tuple(
        name
        for name, value in state.items()
        if name not in specs
        and not name.endswith("num_batches_tracked")
        and (value.numel() == 0 or _place(value) not in given)
    )
    shapes = tuple(
        f"{name}: model {tuple(holds[name].shape)}, pool {tuple(spec.shape)}"
        for name, spec in specs.items()
        if name in holds and tuple(holds[name].shape) != tuple(spec.shape)
    )
    pool = {name: tuple(spec.shape) for name, spec in specs.items()}
    places = {name: tuple(value.shape) for name, value in holds.items()}
    rename = suggest_rename(pool, places) if lacks and extra else None
    return Differences(lacks, extra, shapes, rename, 0 if rename is None else left_over(pool, places, rename))


def _place(value: Tensor) -> tuple[Any, ...]:
    # Tensors without memory all have address 0.
    where = value.untyped_storage()._cdata if value.is_meta else value.data_ptr()
    return value.device, where, value.storage_offset(), tuple(value.shape), value.stride()


def _some(items: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + more
