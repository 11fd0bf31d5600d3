"""A model whose parameters are divided among ranks by FSDP2: every rank holds some rows of each of them.

`fully_shard` gathers a block's parameters before the block runs, and adds up and divides their gradients after. The
model is divided in place, and stays so. What FSDP2 cannot divide, or would compute another thing with, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stockpot import ranks
from stockpot.errors import TaskError
from stockpot.task import normalisation

HELD = 3  # models that learning holds at least: the model itself, the soup's fixed part, and a direction


def needed(model: nn.Module, device: torch.device) -> int | None:
    """The fewest ranks that can hold the model together on such devices; None where each can hold it alone."""
    memory = memory_of(device)
    if memory is None or ranks.size() == 1:
        return None
    wanted = HELD * sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    together = [n for n in range(1, ranks.size() + 1) if ranks.size() % n == 0 and wanted <= n * memory]
    return min(together, default=ranks.size()) if wanted > memory else None


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU; None where memory is the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def shard(model: nn.Module, device: torch.device, together: int | None = None) -> None:
    """Divide the model, which lies on any device, among `together` ranks (default: all) on `device`.

    With fewer than all, the ranks form a mesh: each row of it holds the model once. FSDP2 works within a row; what
    rows tell each other is the coefficients' gradients alone, as in every other way to use ranks.
    """
    blocks = _blocks(model)
    _check(model, blocks)
    size = ranks.size() if together is None else together
    if size < 1 or ranks.size() % size:
        raise TaskError.of(
            "shards",
            expected=f"a number that divides the {ranks.size()} ranks",
            found=str(size),
            fix="leave it out to divide the model among all ranks",
        )
    ranks.join()
    if not (dist.is_available() and dist.is_initialized()):
        raise TaskError.of("shards", "several ranks, or a process group", "one process", "start with torchrun")
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = _mesh(dist.group.WORLD, device.type, size)
    for module in [*blocks, model]:
        # The model's own, too, are given back after its forward pass: coefficients are mixed into what is divided.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gradients are added up; the loss is divided by all samples already
            name = "set_gradient_divide_factor"
            divide = getattr(module, name, None) or module.set_reduce_scatter_divide_factor  # torch before 2.8
            divide(1.0)
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


@cache
def _mesh(world: object, kind: str, together: int) -> Any:
    """This rank's row of a mesh; made once for a world, because every mesh connects the ranks anew."""
    del world
    from torch.distributed.device_mesh import init_device_mesh

    names = ("copies", "shards")
    return init_device_mesh(kind, (dist.get_world_size() // together, together), mesh_dim_names=names)["shards"]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Repeated parts: children of one class in a list or sequence, the outermost ones. One is gathered at a time."""
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        kinds: dict[type, list[nn.Module]] = {}
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for child in module:
                if any(True for _ in child.parameters()):
                    kinds.setdefault(type(child), []).append(child)
        for child in module.children():
            if len(kinds.get(type(child), [])) > 1:
                found.append(child)
            else:
                look(child)

    look(model)
    return found


def _check(model: nn.Module, blocks: list[nn.Module]) -> None:
    def refused(expected: str, found: str, fix: str = "leave out parallel: shards") -> TaskError:
        return TaskError.of(f"model {type(model).__name__} for shards", expected=expected, found=found, fix=fix)

    if not blocks:
        expected = "repeated blocks in a ModuleList or Sequential, of which one is gathered at a time"
        raise refused(expected, "none")
    if statistics := normalisation.statistic_names(model):
        expected = "normalisation that does not look at a batch: ranks see parts of it"
        raise refused(expected, f"running statistics ({statistics[0]})")
    inside = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    modules = model.named_modules(remove_duplicate=False)
    owners = {f"{name}.": number for name, module in modules for number, block in enumerate(blocks) if module is block}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # under every name
        owner = next((number for prefix, number in owners.items() if name.startswith(prefix)), None)
        if inside.get(id(parameter)) != owner:
            raise refused("weights that are tied within a block or outside of all", f"{name}, tied across")
        if parameter.ndim == 0:
            raise refused("parameters with rows", f"{name}, a single number", "give it the shape (1,)")
    for part in [*blocks, model]:
        own = [p for p in part.parameters() if part is not model or id(p) not in inside]
        if len(kinds := {str(p.dtype).removeprefix("torch.") for p in own}) > 1:
            raise refused(f"one dtype in each {type(part).__name__}", ", ".join(sorted(kinds)))


@contextmanager
def called_as_a_whole() -> Iterator[None]:
    """A loss that calls parts of a divided model finds them divided: FSDP2 gathers them when the model is called."""
    try:
        yield
    except (RuntimeError, TaskError) as error:
        if not any(word in str(error) for word in ("DTensor", "lazily initialized")):
            raise
        raise TaskError.of(
            "loss for shards",
            expected="a loss that calls model(...) as a whole",
            found=f"a call of some of its parts ({str(error).splitlines()[0][:200]})",
            fix="give the model a forward that does all of it, or leave out parallel: shards",
        ) from error


def backward(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """This rank's rows of the gradients, which FSDP2 leaves behind and gives not back; those that were there stay."""
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(loss)
        return [None if p.grad is None else ranks.local(p.grad) for p in parameters]
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
