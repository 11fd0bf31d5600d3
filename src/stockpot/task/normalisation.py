"""Normalisation layers that keep running statistics: seen, left alone, or estimated again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _layers(model: nn.Module) -> list[_NormBase]:
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


def statistic_names(model: nn.Module) -> tuple[str, ...]:
    """Names in the state dict, both names of a layer that is used in two places."""
    return tuple(
        f"{name}.{buffer}" if name else buffer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, _NormBase) and layer.running_mean is not None
        for buffer in BUFFERS
        if getattr(layer, buffer) is not None
    )


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        # Set directly: `train()` recurses, and some models override it.
        for module, training in flags:
            module.training = training


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, but normalising with each batch's own statistics and leaving the buffers alone."""
    with modes_restored(model):
        model.eval()
        saved = []
        for layer in _layers(model):
            # An InstanceNorm updates its buffers whatever the flags say, so it must not see them.
            hidden = BUFFERS[:2] if isinstance(layer, _InstanceNorm) else ()
            saved.append((layer, layer.track_running_stats, {name: layer._buffers[name] for name in hidden}))
        try:
            for layer, _, buffers in saved:
                layer.training, layer.track_running_stats = True, False
                layer._buffers.update(dict.fromkeys(buffers))
            yield
        finally:
            for layer, tracking, buffers in saved:
                layer.track_running_stats = tracking
                layer._buffers.update(buffers)


@contextmanager
def estimating(model: nn.Module) -> Iterator[Callable[[int], None]]:
    """Average the statistics of all forward passes into the buffers, weighted by the size that is told before each.

    A layer that no pass reached, and all of them after an error, keep what they had.
    """
    layers = _layers(model)
    before = [(m, m.momentum, {k: v.clone() for k, v in m._buffers.items() if v is not None}) for m in layers]
    seen = dict.fromkeys(layers, 0)
    size, finished = 0, False

    def next_is(count: int) -> None:
        nonlocal size
        size = count

    def weigh(layer: nn.Module, _: Any) -> None:
        # running += momentum * (batch - running) is the running mean when momentum is this batch's share.
        # Counted per call, so a layer used twice in one forward pass averages both uses.
        assert isinstance(layer, _NormBase)
        seen[layer] += size
        layer.momentum = size / seen[layer]

    with modes_restored(model), torch.no_grad():
        model.eval()
        hooks = [layer.register_forward_pre_hook(weigh) for layer in layers]
        try:
            for layer in layers:
                layer.reset_running_stats()
                layer.training = True
            yield next_is
            finished = True
        finally:
            for hook in hooks:
                hook.remove()
            for layer, momentum, buffers in before:
                layer.momentum = momentum
                if not (finished and seen[layer]):
                    for name, value in buffers.items():
                        getattr(layer, name).copy_(value)
