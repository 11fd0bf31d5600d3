"""Comparing all checkpoints with each other, and saying everything that differs at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from stockpot.errors import describe
from stockpot.pool.checkpoint import Checkpoint
from stockpot.pool.files import listed, shown
from stockpot.pool.spec import TensorSpec, dtype_name

Specs = Mapping[str, TensorSpec]


def common_specs(
    checkpoints: Sequence[Checkpoint], mixed_dtypes: bool
) -> tuple[dict[str, TensorSpec], list[str]]:
    """What all checkpoints agree on, and one text for each that differs from the majority."""
    reference = _majority(checkpoints, mixed_dtypes)
    agreeing = 0
    differing: list[tuple[Checkpoint, str, str]] = []
    for checkpoint in checkpoints:
        found, fix = _differences(checkpoint.specs, reference.specs, mixed_dtypes)
        if found:
            differing.append((checkpoint, "; ".join(found), fix))
        else:
            agreeing += 1
    problems = [
        describe(
            shown(checkpoint.path),
            expected=f"the tensors of {shown(reference.path)} ({agreeing} of {len(checkpoints)} have them)",
            found=found,
            fix=fix,
        )
        for checkpoint, found, fix in differing
    ]
    if problems or not mixed_dtypes:
        return dict(reference.specs), problems
    specs = {
        name: TensorSpec(_promoted(checkpoint.specs[name].dtype for checkpoint in checkpoints), spec.shape)
        for name, spec in reference.specs.items()
    }
    return specs, []


def _majority(checkpoints: Sequence[Checkpoint], mixed_dtypes: bool) -> Checkpoint:
    """The first checkpoint of the most common kind. Counter keeps the first of equals first."""
    kinds = [
        tuple((name, _kind(spec.dtype, mixed_dtypes), spec.shape) for name, spec in checkpoint.specs.items())
        for checkpoint in checkpoints
    ]
    return checkpoints[kinds.index(Counter(kinds).most_common(1)[0][0])]


def _kind(dtype: torch.dtype, mixed_dtypes: bool) -> object:
    return "float" if mixed_dtypes and dtype.is_floating_point else dtype


def _differences(specs: Specs, reference: Specs, mixed_dtypes: bool) -> tuple[list[str], str]:
    """What is different, and what to do about it; nothing and "" if all is well."""
    missing = [name for name in reference if name not in specs]
    extra = [name for name in specs if name not in reference]
    both = [(name, specs[name], spec) for name, spec in reference.items() if name in specs]
    shapes = [
        f"{name} has {list(found.shape)} instead of {list(wanted.shape)}"
        for name, found, wanted in both
        if found.shape != wanted.shape
    ]
    dtypes = [
        (name, found.dtype, wanted.dtype)
        for name, found, wanted in both
        if _kind(found.dtype, mixed_dtypes) != _kind(wanted.dtype, mixed_dtypes)
    ]
    found = []
    if missing:
        found.append(f"{_count(missing, 'name')} missing: {listed(missing)}")
    if extra:
        found.append(f"{_count(extra, 'name')} too many: {listed(extra)}")
    if shapes:
        found.append(f"{_count(shapes, 'other shape')}: {listed(shapes)}")
    if dtypes:
        texts = [f"{name} is {dtype_name(a)} instead of {dtype_name(b)}" for name, a, b in dtypes]
        found.append(f"{_count(dtypes, 'other dtype')}: {listed(texts)}")
    return found, _fix(missing, extra, bool(shapes), [(a, b) for _, a, b in dtypes])


def _fix(
    missing: list[str], extra: list[str], shapes: bool, dtypes: Sequence[tuple[torch.dtype, torch.dtype]]
) -> str:
    if missing and extra:
        rename = _suggested_rename(missing, extra)
        if rename is not None:
            return f"the names differ by a prefix only: open the pool with rename={rename}"
    if missing or extra or shapes:
        return "leave this file out, or check that it is a fine-tuned version of the same model"
    if all(a.is_floating_point and b.is_floating_point for a, b in dtypes):
        return (
            "convert the file, or allow it: mixed_dtypes=True, pool.mixed_dtypes in a recipe, --mixed-dtypes"
        )
    return "convert the file to the dtypes of the others, or leave it out"


def _suggested_rename(missing: list[str], extra: list[str]) -> dict[str, str] | None:
    """A prefix map under which the names agree, if one prefix explains all of the difference."""
    wanted = missing[0]
    for candidate in extra:
        common = 0
        for a, b in zip(reversed(wanted.split(".")), reversed(candidate.split(".")), strict=False):
            if a != b:
                break
            common += len(a) + 1
        if not common:
            continue
        old = candidate[: max(len(candidate) - common + 1, 0)]
        new = wanted[: max(len(wanted) - common + 1, 0)]
        if {new + name[len(old) :] if name.startswith(old) else name for name in extra} == set(missing):
            # An empty `old` would put the prefix before every name of every file; dropping it everywhere
            # comes to the same.
            return {old: new} if old else {new: ""}
    return None


def _promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    result: torch.dtype | None = None
    for dtype in dtypes:
        if result is None or dtype == result:
            result = dtype
        elif 1 in (dtype.itemsize, result.itemsize) and torch.float64 not in (dtype, result):
            result = torch.float32  # torch does not promote float8
        elif 1 in (dtype.itemsize, result.itemsize):
            result = torch.float64
        else:
            result = torch.promote_types(result, dtype)
    assert result is not None
    return result


def _count(things: Sequence[object], what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"
