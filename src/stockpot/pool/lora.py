"""LoRA adapters on their base, as the models they make of it: theta_k = theta_0 + s B A.

Materialising is lazy: a tensor of an ingredient is computed when it is asked for, in fp32 or better, and rounded once,
to the base's dtype.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from stockpot.errors import CheckpointError, MismatchError, PoolError, StockpotError, describe
from stockpot.files import at_home, read_table
from stockpot.pool.agreement import quantised
from stockpot.pool.checkpoint import Rename, open_checkpoint
from stockpot.pool.discover import cached
from stockpot.pool.peft_folders import CONFIG, Adapter, Factors, named_by, open_adapter, targets
from stockpot.pool.source import Checkpoint, TensorSpec, dtype_name, listed, mixing_dtype, natural_order, shown


def open_adapters(
    folders: Sequence[Path], base: str | Path | None, rename: Rename | None
) -> tuple[list[Checkpoint], dict[str, TensorSpec], Adapters]:
    """Every adapter as the model it makes of the base, what all of them have, and the factors behind it."""
    opened, problems = [], []
    for folder in folders:
        try:
            opened.append(open_adapter(folder))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    _check_one_base(opened, explicit=base is not None)
    found = _base(opened, base, rename)
    opened = [_oriented(one, found) for one in opened]
    _check_untied(opened, found)
    problems += quantised([found, *(one.file for one in opened)])
    specs = dict(found.specs)
    added = Counter(name for one in opened for name in one.dense if name not in specs)  # such as a new classifier
    lacking = {name for name, count in added.items() if 2 * count >= len(opened)}
    whole = next((one for one in opened if lacking <= one.dense.keys()), opened[0])
    for one in opened:
        problems += _misfits(one, found, lacking, whole)
        for name in lacking & one.dense.keys():
            specs.setdefault(name, one.file.specs[one.dense[name]])
    if problems:
        raise MismatchError("\n".join(problems))
    specs = {name: specs[name] for name in natural_order(tuple(specs))}
    adapters = Adapters(found, tuple(opened), specs)
    return [adapters.checkpoint(k) for k in range(len(opened))], specs, adapters


def sorted_out(folders: Sequence[Path], base: str | Path | None, rename: Rename | None) -> tuple[list[Path], list[str]]:
    """The adapters of which a pool can be made, and why each of the others is in none with them."""
    usable: dict[tuple[str, ...], list[Path]] = {}  # by base, revision, and tensors beside the base's
    refused = []
    for folder in folders:
        try:
            _, specs, alone = open_adapters([folder], base, rename)
            own = sorted(f"{name} {list(specs[name].shape)}" for name in specs.keys() - alone.base.specs.keys())
            usable.setdefault((*alone.each[0].base, *own), []).append(folder)
        except StockpotError as error:
            refused.append(str(error))
    most = max(usable, key=lambda kind: len(usable[kind]), default=())
    for other in (kind for kind in usable if kind != most):
        expected, found = (f"{kind[0]!r} at {kind[1]!r}" for kind in (most, other))
        if most[:2] == other[:2]:
            expected, found = (f"{found} with {listed(kind[2:]) or 'no tensors'} beside it" for kind in (most, other))
        fix = "mix adapters of one base and head; others make another pool"
        refused += [
            str(MismatchError.of(shown(one), f"an adapter of {expected}, as most are", found, fix))
            for one in usable[other]
        ]
    return usable.get(most, []), refused


def _oriented(adapter: Adapter, base: Checkpoint) -> Adapter:
    """How the base keeps each weight, by its shape: fan_in_fan_out is one word, that of the module PEFT saw last."""
    found, seen, square = dict(adapter.factors), set(), []
    for name, one in adapter.factors.items():
        shape = _shape(replace(one, transposed=False), adapter.file.specs)  # (out, in)
        if name not in base.specs or "lora_embedding_" in one.A:
            continue
        if shape == shape[::-1]:
            square.append(name)
        elif len(shape) > 2 or base.specs[name].shape in (shape, shape[::-1]):
            found[name] = replace(one, transposed=len(shape) == 2 and base.specs[name].shape != shape)
            if len(shape) == 2:
                seen.add(found[name].transposed)
    if square and len(seen | {bool(adapter.config.get("fan_in_fan_out"))}) > 1:
        expected = f"fan_in_fan_out in {CONFIG} that fits the shapes in {shown(base.path)}"
        problem = (
            f"weights kept as (in, out) beside some kept as (out, in), and square ones of either: {listed(square)}"
        )
        fix = "merge the adapter into a full checkpoint (merge_and_unload) and mix such checkpoints"
        raise MismatchError.of(shown(adapter.path), expected=expected, found=problem, fix=fix)
    return replace(adapter, factors=found)


def _check_one_base(opened: Sequence[Adapter], *, explicit: bool) -> None:
    """All of them must name one base. A folder may have moved: where the base is given, its own name must agree."""
    kinds = {one: (Path(one.base[0]).name if explicit else one.base[0], one.base[1]) for one in opened}
    first = kinds[opened[0]]
    told = {one: f"{one.base[0]!r} at {one.base[1]!r}" for one in opened}
    if others := [f"{shown(one.path)} on {told[one]}" for one, kind in kinds.items() if kind != first]:
        expected = f"one base for all adapters: {told[opened[0]]} of {shown(opened[0].path)}"
        fix = "mix adapters of one base; those of another make another pool"
        raise MismatchError.of("the adapters", expected=expected, found=f"others: {listed(others)}", fix=fix)


def _check_untied(opened: Sequence[Adapter], base: Checkpoint) -> None:
    """PEFT adds an embedding's delta to the embedding alone, even where the output layer has the same weights."""
    if not read_table(base.path / "config.json").get("tie_word_embeddings"):
        return
    generates = [one for one in opened if one.config.get("task_type") in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM")]
    tied = [shown(one.path) for one in generates if any("lora_embedding_" in f.A for f in one.factors.values())]
    if tied:
        found = f"deltas of an embedding that the base ties to its output layer: {listed(tied)}"
        fix = "untie the base and train on that, or leave them out"
        raise MismatchError.of("the adapters", "adapters that one set of weights can hold", found, fix)


def _base(opened: Sequence[Adapter], base: str | Path | None, rename: Rename | None) -> Checkpoint:
    """The base model, under the names that the adapters' model has."""
    name, revision = opened[0].base
    # What a stranger's adapter names is opened as a checkpoint, if it is a path here. It is no home of somebody, and no
    # place on another machine: Windows would sign in there.
    path = Path(name) if base is None else at_home(base)
    elsewhere = base is None and (not name or name.replace("\\", "/").startswith("//"))
    if elsewhere or not os.path.exists(path):  # noqa: PTH110  (also for names that no path can have)
        found_there = cached(str(base) if base is not None else name, revision)
        if found_there is None:
            found = f"{str(base or name)!r:.300} neither as a path here nor in the Hugging Face cache"
            raise PoolError.of(
                "the base of the adapters",
                "a local model folder or checkpoint",
                found if base or name else f"none named in {CONFIG}, and none given",
                "download the base and give its folder: Pool.open(..., base='path/to/base')",
            )
        path = found_there
    checkpoint = open_checkpoint(path, rename=rename)
    if rename is not None or (prefix := _prefix(checkpoint, opened)) is None:
        return checkpoint
    return open_checkpoint(path, rename=lambda name: prefix + name if prefix[0] != "-" else name[len(prefix) - 1 :])


def _prefix(base: Checkpoint, opened: Sequence[Adapter]) -> str | None:
    """What the adapters' model has before every name of its base (`bert.`), or, after a minus, has not."""
    wanted = {name for one in opened for name in one.factors}
    if wanted <= base.specs.keys():
        return None
    for name in sorted(wanted):
        parts = name.split(".")
        for cut in range(1, len(parts) - 1):
            prefix = ".".join(parts[:cut]) + "."
            if all(other.startswith(prefix) and other[len(prefix) :] in base.specs for other in wanted):
                return prefix
        break
    for stored in base.specs:
        first = stored.partition(".")[0] + "."
        if all(name.startswith(first) for name in base.specs) and all(first + name in base.specs for name in wanted):
            return "-" + first
        break
    return None


def _misfits(adapter: Adapter, base: Checkpoint, lacking: set[str], first: Adapter) -> list[str]:
    """What stands between an adapter and the base."""
    specs, shapes, kinds = adapter.file.specs, [], []
    changes = [(name, _shape(one, specs), specs[one.A].dtype) for name, one in adapter.factors.items()]
    changes += [(name, specs[key].shape, specs[key].dtype) for name, key in adapter.dense.items()]
    changes += [(name, specs[key].shape, specs[key].dtype) for name, (key, _) in adapter.added.items()]
    for name, shape, dtype in changes:
        there = base.specs.get(name) or (first.dense.get(name) and first.file.specs[first.dense[name]])
        if there and there.shape != shape:
            shapes.append(f"{name} has {list(shape)} instead of {list(there.shape)}")
        if name in base.specs and base.specs[name].dtype.is_floating_point != dtype.is_floating_point:
            kinds.append(f"{name} is {dtype_name(base.specs[name].dtype)} there, {dtype_name(dtype)} here")
    unknown = [name for name in (*adapter.factors, *adapter.added) if name not in base.specs]
    alone = [name for name in adapter.dense if name not in base.specs and name not in lacking]
    absent = sorted(lacking - adapter.dense.keys()) + _left_out(adapter, base)
    sorts = {
        "not in the base": unknown, "neither in the base nor in most adapters": alone,
        "of another shape": shapes, "of another kind": kinds, "missing here": absent,
    }  # fmt: skip
    found = [f"{len(texts)} {what}: {listed(texts)}" for what, texts in sorts.items() if texts]
    if not found:
        return []
    expected = f"deltas of tensors that {shown(base.path)} has"
    fix = "give the base that this adapter was trained on (base=), or leave the adapter out"
    return [describe(shown(adapter.path), expected=expected, found="; ".join(found), fix=fix)]


def _left_out(adapter: Adapter, base: Checkpoint) -> list[str]:
    """Factors that the configuration promises, in the layers that have some: there PEFT would have made all of them."""
    config, layers = adapter.config, {_layer(name) for name in adapter.factors}
    chosen = any(config.get(field) for field in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    said = targets(config)
    if chosen or said is None:
        return []
    absent = (name for name in base.specs if name not in adapter.factors and name not in adapter.dense)
    return [
        f"factors of {name}"
        for name in absent
        if _layer(name) in layers and named_by(said, name.removesuffix(".weight"))
    ]


def _layer(name: str) -> str:
    """What all layers of one kind are called: the name up to its last number; without one, the whole name."""
    return re.sub(r"\d+", "#", re.sub(r"(.*\.\d+\.).*", r"\1", name))


def _shape(one: Factors, specs: Mapping[str, TensorSpec]) -> tuple[int, ...]:
    A, B = specs[one.A].shape, specs[one.B].shape
    return (*A[1:], B[0]) if one.transposed else (B[0], *A[1:])


@dataclass(frozen=True, eq=False)
class Adapters:
    """K adapters on one base."""

    base: Checkpoint
    each: tuple[Adapter, ...]
    specs: Mapping[str, TensorSpec]

    def part(self, chosen: Sequence[int]) -> Adapters:
        return Adapters(self.base, tuple(self.each[k] for k in chosen), self.specs)

    def checkpoint(self, k: int) -> Checkpoint:
        """Adapter k as the whole model it makes."""
        one = self.each[k]
        files = (one.path / CONFIG, *one.file.files, *self.base.files)
        specs = MappingProxyType(self.specs)
        return Checkpoint(one.path, "lora", files, specs, lambda name: self.tensor(k, name), spare=self.spare)

    @cached_property
    def spare(self) -> frozenset[str]:
        """Tensors of the base that no adapter changes."""
        changed = {name for one in self.each for name in (*one.factors, *one.dense, *one.added)}
        return frozenset(self.base.specs.keys() - changed)

    def tensor(self, k: int, name: str) -> Tensor:
        """theta_0 + s B A, or what the adapter has instead, in the dtype of the pool."""
        one, dtype = self.each[k], self.specs[name].dtype
        if name in one.dense:
            made = one.file.tensor(one.dense[name])
        else:
            made = self.base.tensor(name)
        if name in one.added:
            key, scale = one.added[name]
            made = made.to(mixing_dtype(dtype)) + scale * one.file.tensor(key).to(mixing_dtype(dtype))
        if name in one.factors:
            made = made.to(mixing_dtype(dtype)) + self.delta(k, name, mixing_dtype(dtype))
        return made.to(dtype)

    def delta(self, k: int, name: str, dtype: torch.dtype) -> Tensor:
        """s B A in the shape of the base's tensor."""
        file, factors = self.each[k].file, self.each[k].factors[name]
        A, B = (file.tensor(key).to(dtype) for key in (factors.A, factors.B))
        product = (B.flatten(1) @ A.flatten(1)) * factors.scale  # (out, in)
        return product.T if factors.transposed else product.view(B.shape[0], *A.shape[1:])

    def factors(self, k: int, name: str) -> tuple[Tensor, Tensor, float, bool]:
        """A (r, in), B (out, r), their scale, and whether the base keeps this weight as (in, out)."""
        file, one = self.each[k].file, self.each[k].factors[name]
        return file.tensor(one.A), file.tensor(one.B), one.scale, one.transposed

    def stacked(self, name: str, weights: Mapping[int, float], dtype: torch.dtype) -> tuple[Tensor, Tensor, bool]:
        """The deltas of these adapters times their weights as one, B A, in the orientation of the first."""
        turned = self.each[next(iter(weights))].factors[name].transposed
        parts = []
        for k, weight in weights.items():
            A, B, scale, own = self.factors(k, name)
            A, B = (A.to(dtype), B.to(dtype)) if own == turned else (B.T.to(dtype), A.T.to(dtype))  # (B A)^T = A^T B^T
            parts.append((A, B * (weight * scale)))
        return torch.cat([A for A, _ in parts]), torch.cat([B for _, B in parts], dim=1), turned

    def rank(self, k: int, name: str) -> int:
        one = self.each[k]
        return one.file.specs[one.factors[name].A].shape[0]

    def only_factors(self, name: str) -> bool:
        """Whether all adapters have the base's values here, or the base's and s B A in one orientation."""
        turned = {one.factors[name].transposed for one in self.each if name in one.factors}
        return len(turned) < 2 and not any(name in one.dense or name in one.added for one in self.each)

    def nbytes(self, k: int, name: str) -> int:
        """Bytes of the factors of one tensor; 0 where there are none."""
        one, specs = self.each[k].factors.get(name), self.each[k].file.specs
        return 0 if one is None else specs[one.A].nbytes + specs[one.B].nbytes
