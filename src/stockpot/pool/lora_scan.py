"""The pass of pool/scan.py over LoRA adapters, without making the models that they make of their base.

The base is read once. Inner products of deltas need no delta either: with the factors of all adapters side by side,
<B_i A_i, B_j A_j> is the sum over block (i, j) of (B^T B) * (A A^T), which are as wide as all ranks together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from stockpot.events import Listener, ignore, progress
from stockpot.pool.lora import Adapters
from stockpot.pool.scan import Scan, TensorScan, raw_bytes, scan
from stockpot.pool.source import dtype_name

CELLS = 1 << 22  # numbers of a product of factors held at a time


def scan_adapters(
    adapters: Adapters, listen: Listener, *, no_weights: frozenset[str] = frozenset(), hashes_only: bool = False
) -> Scan:
    """Like `scan`; what an adapter holds as a full tensor is read as that of every ingredient."""
    K = len(adapters.each)
    whole = {name: spec for name, spec in adapters.specs.items() if not adapters.only_factors(name)}
    opened = [replace(adapters.checkpoint(k), specs=whole) for k in range(K)]
    full = scan(opened, whole, ignore, no_weights=no_weights, hashes_only=hashes_only)
    base = scan([adapters.base], adapters.base.specs, ignore, hashes_only=hashes_only)
    hashes = []  # of each adapter's tensors
    for k in range(K):
        hashes.append(_hashes(adapters, k))
        progress(listen, "hash", k + 1, K, unit="adapters")
    found: dict[str, TensorScan] = {}
    gram = full.gram.clone()
    seen: set[tuple[str, ...]] = set()
    for name in adapters.specs:
        if name in whole:
            found[name] = full.tensors[name]
            continue
        tensor, products = _tensor(adapters, name, base.tensors[name], hashes, hashes_only)
        found[name] = tensor
        # As in `scan`: what has the content of an earlier tensor may be tied to it.
        if products is not None and tensor.stored not in seen:
            gram += products
        elif products is not None:
            found[name] = replace(tensor, gram=products)
        seen.add(tensor.stored)
    digests = tuple(_digest(adapters, k, base.digests[0], hashes[k]) for k in range(K))
    return Scan(not hashes_only, digests, found, gram, base.digests[0])


def _tensor(
    adapters: Adapters, name: str, base: TensorScan, hashes: list[dict[str, str]], hashes_only: bool
) -> tuple[TensorScan, Tensor | None]:
    """One tensor that is the base's, or the base's and s B A; and inner products of the deltas, where some differ."""
    K = len(adapters.each)
    stored, moved = [base.stored[0]] * K, []  # which adapters have a delta here
    for k, one in enumerate(adapters.each):
        factors = one.factors.get(name)
        if factors is not None and "" not in (hashes[k][factors.A], hashes[k][factors.B]):  # B of zeros: untrained
            content = [base.stored[0], hashes[k][factors.A], hashes[k][factors.B], factors.scale]
            stored[k] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
            moved.append(k)
    constant = tuple(base.constant[0] and k not in moved for k in range(K))
    counts, squares = base.counts.expand(2, K).clone(), base.squares.expand(K).clone()
    products = None
    if moved and not hashes_only:
        with_base, products = _inner(adapters, name, moved)
        squares += 2 * with_base + products.diagonal()
        for k in moved:
            if not _small(adapters, k, name):
                made = adapters.tensor(k, name)
                counts[:, k] = torch.stack([made.isnan().sum(), made.isinf().sum()])
                squares[k] = made.double().square().sum()
    tensor = TensorScan(tuple(stored), tuple(stored), constant, counts, squares)
    return tensor, products if len({*stored}) > 1 else None


def _small(adapters: Adapters, k: int, name: str) -> bool:
    """Whether base and delta are finite and far from what the dtype cannot hold."""
    A, B, scale, _ = adapters.factors(k, name)
    bound = float(A.abs().max()) * float(B.abs().max()) * len(A) * abs(scale)
    return bound < torch.finfo(adapters.specs[name].dtype).max / 2


def inner_products(adapters: Adapters) -> Tensor:
    """<delta_i, delta_j> of what the factors add, whole tensors not counted. (K, K)"""
    K = len(adapters.each)
    total = torch.zeros(K, K, dtype=torch.float64)
    for name in adapters.specs:
        if moved := [k for k in range(K) if name in adapters.each[k].factors]:
            total += _inner(adapters, name, moved, with_base=False)[1]
    return total


def _inner(adapters: Adapters, name: str, moved: list[int], *, with_base: bool = True) -> tuple[Tensor, Tensor]:
    """<theta_0, delta_k> (K,), where it is asked for, and <delta_i, delta_j> (K, K)."""
    K = len(adapters.each)
    A, B, turned = adapters.stacked(name, dict.fromkeys(moved, 1.0), torch.float64)
    A, B = A.flatten(1), B.flatten(1)  # (R, in), (out, R)
    owner = torch.tensor([k for k in moved for _ in range(adapters.rank(k, name))])  # (R,)
    base = adapters.base.tensor(name).double() if with_base else None
    along = torch.zeros(K, dtype=torch.float64)
    gram = torch.zeros(K, K, dtype=torch.float64)
    for rows in torch.arange(len(A)).split(max(1, CELLS // max(len(A), A.shape[1]))):  # type: ignore[no-untyped-call]
        if base is not None:
            flat = base.T if turned else base.flatten(1)  # (out, in)
            along.index_add_(0, owner[rows], (A[rows] * (B[:, rows].T @ flat)).sum(dim=1))
        products = (B[:, rows].T @ B).mul_(A[rows] @ A.T)  # (rows, R)
        gram.index_add_(0, owner[rows], torch.zeros(len(rows), K, dtype=torch.float64).index_add_(1, owner, products))
    return along, gram


def _hashes(adapters: Adapters, k: int) -> dict[str, str]:
    """SHA-256 of every tensor of an adapter; an empty text for one of zeros."""
    file = adapters.each[k].file
    tensors = {key: file.tensor(key) for key in file.specs}
    return {
        key: hashlib.sha256(raw_bytes(tensor).numpy().data).hexdigest() if bool(tensor.any()) else ""
        for key, tensor in tensors.items()
    }


def _digest(adapters: Adapters, k: int, base: str, hashes: Mapping[str, str]) -> str:
    """SHA-256 of an ingredient: of the base's digest, and of every tensor and scale of the adapter.

    Not of the product: its last bits depend on the machine that multiplies.
    """
    adapter = adapters.each[k]
    total = hashlib.sha256(json.dumps(["lora", base]).encode() + b"\n")
    scales = {key: one.scale for one in adapter.factors.values() for key in (one.A, one.B)}
    for key in sorted(adapter.file.specs):
        spec = adapter.file.specs[key]
        content = hashes[key] or hashlib.sha256(raw_bytes(adapter.file.tensor(key)).numpy().data).hexdigest()
        line = [key, dtype_name(spec.dtype), list(spec.shape), content, scales.get(key)]
        total.update(json.dumps(line).encode() + b"\n")
    return total.hexdigest()
