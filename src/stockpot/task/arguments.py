"""Settings of a task that can be wrong by themselves."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from stockpot.errors import TaskError, describe

METRICS = ("accuracy", "loss")
STATISTICS = ("recalibrate", "average", "copy")
AUTOCAST = (None, torch.bfloat16, torch.float16)


def check_arguments(
    model: Any, loss: Any, metric: Any, autocast: Any, batch_size: Any, statistics: Any
) -> None:
    if not isinstance(model, nn.Module):
        raise _wrong(
            "model", "a torch.nn.Module", type(model).__name__, "build the model and pass the instance"
        )
    if loss is not None and not callable(loss):
        raise _wrong("loss", "a function loss(model, batch)", repr(loss), "leave it out for the default loss")
    if not callable(metric) and metric not in METRICS:
        raise _wrong(
            "metric",
            "'accuracy', 'loss' or a function metric(outputs, batch)",
            repr(metric),
            "use one of these names, or a function whose higher values are better",
        )
    if autocast not in AUTOCAST:
        raise _wrong(
            "autocast",
            "torch.bfloat16, torch.float16 or None",
            repr(autocast),
            "use torch.bfloat16, or leave it out",
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise _wrong("batch_size", "a whole number of at least 1", repr(batch_size), "use 256")
    if statistics not in STATISTICS:
        raise _wrong(
            "statistics",
            ", ".join(map(repr, STATISTICS[:-1])) + f" or {STATISTICS[-1]!r}",
            repr(statistics),
            "use 'recalibrate' unless the fitting data is unlike the training data",
        )


def place(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Move the model where it is wanted, or find out where it is."""
    if device is None:
        tensors = itertools.chain(model.parameters(), model.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))
    try:
        wanted = torch.device(device)
        # Allocating fixes the index ("cuda" becomes "cuda:0") and fails early where there is no such device.
        found = torch.empty(0, device=wanted).device
        model.to(found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise _wrong(
            "device",
            "a device of this machine with room for the model",
            f"{device!s} ({str(error).splitlines()[0]})",
            "use device='cpu', or another that torch can see",
        ) from error
    return found


def _wrong(subject: str, expected: str, found: str, fix: str) -> TaskError:
    return TaskError(describe(subject, expected=expected, found=found, fix=fix))
