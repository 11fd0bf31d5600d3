"""Fingerprints of content: SHA-256 of each tensor's bytes, and of a whole checkpoint.

The digest of a checkpoint is SHA-256 over one line for each tensor, in code-point order of the names: JSON
of `[name, dtype, shape, SHA-256 of the tensor's bytes in row-major order]`, then a newline. It depends on
nothing else, so a `.pt` file and its safetensors conversion have the same digest. Hashing tensor by tensor
is what lets both cores work on one file, and what makes frozen and tied tensors and the facts of a subset
come for free."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import Tensor

from stockpot.events import Listener
from stockpot.pool.checkpoint import Checkpoint
from stockpot.pool.meter import Meter
from stockpot.pool.spec import TensorSpec, dtype_name

THREADS = 8  # twice as many gained nothing on 16 slow cores

Hashes = dict[str, str]  # tensor name -> SHA-256 of its bytes, in hexadecimal


def raw_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, row-major: a view where it is contiguous, else a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def hash_tensor(tensor: Tensor) -> str:
    return hashlib.sha256(raw_bytes(tensor).numpy().data).hexdigest()  # releases the GIL


def digest(specs: Mapping[str, TensorSpec], hashes: Mapping[str, str]) -> str:
    total = hashlib.sha256()
    for name in sorted(specs):
        spec = specs[name]
        line = json.dumps([name, dtype_name(spec.dtype), list(spec.shape), hashes[name]], ensure_ascii=True)
        total.update(line.encode() + b"\n")
    return total.hexdigest()


def hash_all(checkpoints: Sequence[Checkpoint], known: Sequence[Hashes], listen: Listener) -> None:
    """Fill `known`, one table for each checkpoint, with what is not in it yet.

    Tensors are hashed in place, in the memory-mapped file; each worker holds at most one copy, of a
    tensor that is not contiguous.
    """
    todo = [
        (checkpoint, hashes, name)
        for checkpoint, hashes in zip(checkpoints, known, strict=True)
        for name in checkpoint.specs
        if name not in hashes
    ]
    total = sum(checkpoint.specs[name].nbytes for checkpoint, _, name in todo)
    if not todo:
        return
    meter = Meter(listen, "hash", total)
    workers = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="stockpot-hash")
    try:
        jobs = {workers.submit(_hash, checkpoint, name): (hashes, name) for checkpoint, hashes, name in todo}
        for job in as_completed(jobs):
            hashes, name = jobs[job]
            hashes[name], nbytes = job.result()
            meter.add(nbytes)
    finally:
        workers.shutdown(cancel_futures=True)  # on Ctrl-C do not finish gigabytes first


def _hash(checkpoint: Checkpoint, name: str) -> tuple[str, int]:
    return hash_tensor(checkpoint.tensor(name)), checkpoint.specs[name].nbytes
