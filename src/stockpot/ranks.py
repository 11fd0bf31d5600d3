"""Ranks of `torch.distributed`: the same command in several processes, which together make one soup.

Each rank takes a part of every batch. The projection is linear, so the (b, G) projections of the ranks' gradients add
up to that of the whole batch: kilobytes per step instead of the model's size. Rank 0 opens, plans, decides and writes;
the others are told. Everything here does nothing where there is one process.
"""

from __future__ import annotations

import functools
import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from stockpot import signals, words
from stockpot._version import __version__
from stockpot.errors import RankError, RunError, StockpotError
from stockpot.events import Event, Listener
from stockpot.watch import STOPPED, Watch

T = TypeVar("T")
_meetings = count()  # how often this rank has waited for the others in `all_here`
_watch: Watch | None = None
_alone = 0  # how many `apart` blocks this rank is in
# A rank that has ended is noticed at once, by its connection. One that hashes a terabyte or learns the longest fold
# must be waited for, so this is no limit on work.
_PATIENCE = timedelta(days=7)
_MEETING = timedelta(minutes=10)  # for all to be started
# What torchrun sets, and what Slurm's srun calls the same.
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def _environment(name: str) -> str | None:
    started_by_srun = "SLURM_STEP_ID" in os.environ and "RANK" not in os.environ
    return os.environ.get(_SLURM[name] if started_by_srun else name)


def launched() -> bool:
    """Whether torchrun or srun has started this process as one of several."""
    size = _environment("WORLD_SIZE") or ""
    return size.isdigit() and int(size) > 1 and (_environment("RANK") or "").isdigit()


def join() -> None:
    """Be the rank that the environment says, unless the caller has made a process group already."""
    if launched() and dist.is_available() and not dist.is_initialized():
        _join()
    global _watch
    if size() > 1 and _watch is None:
        _watch = Watch(own(), gathered)


def _join() -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RunError.of(
            "the environment of several ranks",
            expected="MASTER_ADDR and MASTER_PORT, where rank 0 is met",
            found=f"no {' and no '.join(missing)}",
            fix="start with torchrun, or export both before srun (docs/scaling.md has an example)",
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(_environment("LOCAL_RANK") or 0) % torch.cuda.device_count())
    size = int(_environment("WORLD_SIZE") or 1)
    try:
        store, rank, _ = next(rendezvous("env://", int(_environment("RANK") or 0), size, timeout=_MEETING))
        # Without a backend's name torch takes gloo for what is on the host and NCCL for what is on a GPU.
        dist.init_process_group(store=store, rank=rank, world_size=size)
    except RuntimeError as error:  # of the store or a connection
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError.of(
            "the ranks of this run",
            expected=f"{size} that meet at {place} within {_MEETING.total_seconds():g} s",
            found=str(error).strip().partition("\n")[0].rstrip("."),
            fix="start as many as WORLD_SIZE (or SLURM_NTASKS) says, on hosts that reach each other, with a free port",
        ) from error
    # At once: ranks with other code may not even exchange the same things in the same order.
    check_same({"stockpot": __version__, "python": platform.python_version(), "torch": torch.__version__})


@functools.cache
def _hosts() -> dist.ProcessGroup | None:
    """For what ranks tell each other: gloo, also where gradients go through NCCL. All must ask for it first at once."""
    return dist.new_group(backend="gloo", timeout=_PATIENCE) if active() else None


def leave() -> None:
    """The end of a command whose ranks are all done."""
    if dist.is_available() and dist.is_initialized():
        global _watch
        if _watch is not None:
            _watch.close()
            _watch = None
        dist.destroy_process_group()
        _hosts.cache_clear()


def active() -> bool:
    """Whether there are several ranks and this one works with the others now."""
    return size() > 1 and not _alone


def size() -> int:
    """How many ranks there are, also while they work apart."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own() -> int:
    """The number of this rank."""
    return dist.get_rank() if size() > 1 else 0


def first() -> bool:
    """Whether this rank opens, decides, writes and shows; true of a process alone."""
    return own() == 0


@contextmanager
def apart() -> Iterator[None]:
    """Meanwhile this rank computes as a process alone does: nothing is divided, and nothing is exchanged."""
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


@contextmanager
def meeting() -> Iterator[None]:
    """Meanwhile ranks that work apart exchange what they have."""
    global _alone
    before, _alone = _alone, 0
    try:
        yield
    finally:
        _alone = before


@contextmanager
def watched() -> Iterator[None]:
    """What all ranks do together. When another one ends meanwhile, this one stops, and a RankError says which and why.

    Within GRACE seconds, whatever this rank does: also where it exchanges nothing, or waits in an exchange for ever.
    """
    watch = _watch
    if watch is None or watch.inside:
        yield
        return
    watch.enter()
    done = False
    try:
        with signals.handled(_stop):
            yield
        done = True
    except BaseException as error:
        with signals.held():  # this is the last word on how it ends
            watch.inside = False
            told = isinstance(error, KeyboardInterrupt) and not watch.interrupted
            if told:  # by a signal; torchrun sends one when another rank has ended, which is then the reason
                watch.say(STOPPED)
            why = watch.why(wait=5.0 if lost(error) else 1.0 if told else 0.0)
            if lost(error) or watch.interrupted or (told and why is not None and not why.endswith(STOPPED)):
                watch.say(STOPPED)
                raise RankError(why or "another rank has ended") from error
        raise
    finally:
        watch.leave(done=done)


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (a handler's shape)
    raise KeyboardInterrupt(number)


def last_words(words: str) -> None:
    """Tell the others why this rank is about to end."""
    if _watch is not None:
        _watch.say(words)


def speaks() -> bool:
    """Whether this is the first of the ranks that are left, which says that another one has ended."""
    return _watch is None or _watch.speaks()


def announce(listen: Listener, device: torch.device | None, how: str) -> None:
    """One line that says how the work is arranged; without a device nothing is exchanged between devices."""
    if active():
        hosts = set(gathered(socket.gethostname()))
        places = "one host" if len(hosts) == 1 else f"{len(hosts)} hosts"
        backend = "NCCL" if device is not None and device.type == "cuda" else "gloo"
        listen(Event("phase", {"text": f"{size()} ranks on {places} ({backend}): {how}"}))


# What ranks hold of a model that is divided among them (task/shards.py) --------------------------------------


def hold_parts(model: torch.nn.Module) -> bool:
    """Whether ranks hold parts of this model."""
    return hasattr(next(model.parameters(), None), "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a parameter or gradient, to read and to write; all of a tensor that is not divided."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        found: Tensor = tensor.to_local()
    return found


def rows(tensor: Tensor) -> slice:
    """Which rows of the whole tensor are this rank's."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return slice(None)
    # As torch.chunk cuts: all pieces have the same length, but for the last ones.
    length = -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * length, tensor.shape[0])
    return slice(start, start + len(local(tensor)))


def fill(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor of a model this whole value, or this rank's rows of it."""
    local(tensor).data.copy_(value[rows(tensor)] if value.ndim else value)


def fill_model(model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """The same for a model that is divided, whose own `load_state_dict` takes no whole tensors."""
    held: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    held |= model.named_parameters(remove_duplicate=False)
    for name, value in tensors:
        if name in held:
            fill(held[name], value)


# What is exchanged -----------------------------------------------------------------------------------------


def sharing() -> int:
    """How many ranks take a part of a batch each."""
    return dist.get_world_size() if active() else 1


def share(indices: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return indices[dist.get_rank() :: dist.get_world_size()] if active() else indices


def stretch(indices: Tensor) -> Tensor:
    """This rank's part of samples whose order is kept when the parts are put together."""
    return indices.tensor_split(dist.get_world_size())[dist.get_rank()] if active() else indices


def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the ranks, in one exchange."""
    if active():
        parts = list(tensors)
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat)
        done = 0
        for part in parts:
            part.copy_(flat[done : done + part.numel()].view_as(part))
            done += part.numel()


def gathered(mine: T) -> list[T]:
    """What every rank has, by rank. For small things: they are pickled."""
    if not active():
        return [mine]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, mine, group=_hosts())
    return box


def decided_once(decide: Callable[[], T]) -> T:
    """What rank 0 decides, on every rank. All of them compute it, because computing may need their devices."""
    return _from_first(decide())


def on_first(work: Callable[[], T]) -> T:
    """What rank 0 alone does, and its result on every rank; an error of ours there is an error on all."""
    if not active():
        return work()
    found: tuple[T | None, StockpotError | None] = (None, None)
    if first():
        try:
            found = (work(), None)
        except StockpotError as error:
            found = (None, error)
    result, failed = _from_first(found if found[1] is None else (None, found[1]))
    if failed is not None:
        raise failed
    return result  # type: ignore[return-value]


def _from_first(mine: T) -> T:
    if not active():
        return mine
    box: list[Any] = [mine]
    dist.broadcast_object_list(box, src=0, group=_hosts())
    found: T = box[0]
    return mine if first() else found


def all_here(seconds: float = 8.0) -> bool:
    """Whether every rank comes to this place too: what fails on all of them alike is no accident of one."""
    if not active():
        return True
    # Through the store in which ranks have found each other: dist.monitored_barrier waits for a rank that is busy in
    # another exchange as long as that takes, whatever its timeout.
    store = _get_default_store()
    key, last = f"stockpot/here/{next(_meetings)}", time.monotonic() + seconds
    try:
        store.add(key, 1)
        while store.add(key, 0) < dist.get_world_size():
            if time.monotonic() > last:
                return False
            time.sleep(0.05)
    except RuntimeError:
        return False  # the store was on a rank that has ended
    return True


def lost(error: BaseException) -> bool:
    """Whether this is how the end of another rank looks from here."""
    if not active() or not isinstance(error, RuntimeError):
        return False
    return any(word in str(error) for word in ("gloo/", "NCCL", "Connection closed", "Connection reset", "Socket"))


def check_same(facts: Mapping[str, Any]) -> None:
    """Refuse to begin where a rank has other versions, files, data or settings than rank 0."""
    every = gathered((socket.gethostname(), {key: str(value) for key, value in facts.items()}))
    (host, wanted), *others = every
    lines = [
        f"{key}: {wanted.get(key, 'nothing'):.200} on rank 0 ({host}),"
        f" {found.get(key, 'nothing'):.200} on rank {rank} ({place})"
        for rank, (place, found) in enumerate(others, start=1)
        for key in {**wanted, **found}
        if found.get(key) != wanted.get(key)
    ]
    if lines:
        raise RunError.of(
            "the ranks of this run",
            expected="the same versions, files, data and settings on all of them",
            found=f"differences:\n    {words.first_of(lines, 12)}\n ",
            fix="start all ranks with the same installation, recipe and files",
        )
