"""Whether checkpoints can be mixed with each other: everything that differs is said at once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from stockpot.errors import describe
from stockpot.pool.nesting import is_average
from stockpot.pool.source import Checkpoint, TensorSpec, dtype_name, listed, shown

Specs = Mapping[str, TensorSpec]
# Integers under these names are packed or scaled weights: GPTQ, AWQ, compressed-tensors, HQQ, quanto, MXFP4.
_PACKED = re.compile(r"(.*[._])?(q?weight|weight_packed|q_weight|w_q|_data|blocks|_packed_params)", re.IGNORECASE)
# What low-precision weights are multiplied with: scale, weight_scale_inv, SCB, weight.absmax, zero_point. The first
# part says of what; some of them mean the whole module.
_SCALE = re.compile(r"(.*?)_?(scales?(_inv|_weight)?|scb|absmax|quant_map|q?zeros|zero_points?)", re.IGNORECASE)
_OF_THE_MODULE = ("", "weight", "qweight", "input", "output", "activation")


def common_specs(checkpoints: Sequence[Checkpoint], mixed_dtypes: bool) -> tuple[dict[str, TensorSpec], list[str]]:
    """What all checkpoints agree on, and one text for each that differs from the majority."""
    if all(checkpoint.specs == checkpoints[0].specs for checkpoint in checkpoints):
        return dict(checkpoints[0].specs), []
    reference = _majority(checkpoints, mixed_dtypes)
    compared = [(c, *_differences(c.specs, reference.specs, mixed_dtypes)) for c in checkpoints]
    differing = [(checkpoint, found, fix) for checkpoint, found, fix in compared if found]
    agreeing = f"{len(checkpoints) - len(differing)} of {len(checkpoints)} have them"
    expected = f"the tensors of {shown(reference.path)} ({agreeing})"
    problems = [
        describe(shown(checkpoint.path), expected=expected, found="; ".join(found), fix=fix)
        for checkpoint, found, fix in differing
    ]
    if problems or not mixed_dtypes:
        return dict(reference.specs), problems
    specs = {
        name: TensorSpec(_promoted(checkpoint.specs[name].dtype for checkpoint in checkpoints), spec.shape)
        for name, spec in reference.specs.items()
    }
    return specs, []


def mixed_averages(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """One text where some files gave raw weights and others averaged ones, which are points of another kind."""
    averaged = [checkpoint for checkpoint in checkpoints if is_average(checkpoint.key)]
    if len(averaged) in (0, len(checkpoints)):
        return []
    places = [f"{shown(checkpoint.path)} ({checkpoint.key})" for checkpoint in averaged]
    return [
        describe(
            "the pool",
            expected="raw weights of every checkpoint, or averaged (EMA) ones of every",
            found=f"raw ones, and averaged ones in {len(averaged)} of {len(checkpoints)}: {listed(places)}",
            fix="open the pool with key='ema' if all have averages, or leave these out",
        )
    ]


def quantised(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """One text for each checkpoint whose weights are integers or scaled: averaging their codes gives nonsense."""
    problems = []
    for checkpoint in checkpoints:
        names = _quantised_names(checkpoint.specs)
        names += [name for name in checkpoint.ignored if name.endswith("_packed_params")]
        if names:
            texts = [f"{n} ({dtype_name(checkpoint.specs[n].dtype)})" if n in checkpoint.specs else n for n in names]
            problems.append(
                describe(
                    shown(checkpoint.path),
                    expected="weights that can be averaged number by number",
                    found=f"quantised ones, which mean something only with their scales: {listed(texts)}",
                    fix="dequantise them (save them as bfloat16 or float32), mix those, and quantise the soup",
                )
            )
    return problems


def _quantised_names(specs: Specs) -> list[str]:
    scales: defaultdict[str, set[torch.dtype]] = defaultdict(set)  # module or tensor -> dtypes of what scales it
    for name, spec in specs.items():
        module, _, own = name.rpartition(".")
        if match := _SCALE.fullmatch(own):
            scales[module if match[1] in _OF_THE_MODULE else f"{module}.{match[1]}".lstrip(".")].add(spec.dtype)
    found = []
    for name, spec in specs.items():
        module, _, own = name.rpartition(".")
        integer = not (spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype == torch.bool)
        packed = integer and spec.numel > 1 and _PACKED.fullmatch(own)
        byte = (integer or spec.dtype.is_floating_point) and spec.dtype.itemsize == 1 and not _SCALE.fullmatch(own)
        if packed or (byte and (scales[module] | scales[name]) - {spec.dtype}):
            found.append(name)
    return found


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
    others = [f"{name} is {dtype_name(a)} instead of {dtype_name(b)}" for name, a, b in dtypes]
    found = [
        f"{len(texts)} {what}{'' if len(texts) == 1 else 's'}{rest}: {listed(texts)}"
        for texts, what, rest in (
            (missing, "name", " missing"),
            (extra, "name", " too many"),
            (shapes, "other shape", ""),
            (others, "other dtype", ""),
        )
        if texts
    ]
    return found, _fix(missing, extra, bool(shapes), [(a, b) for _, a, b in dtypes])


def _fix(missing: list[str], extra: list[str], shapes: bool, dtypes: Sequence[tuple[torch.dtype, torch.dtype]]) -> str:
    rename = _suggested_rename(missing, extra)
    if rename is not None:
        return f"the names differ by a prefix only: open the pool with rename={rename}"
    if missing or extra or shapes:
        return "leave this file out, or check that it is a fine-tuned version of the same model"
    if all(a.is_floating_point and b.is_floating_point for a, b in dtypes):
        return "convert the file, or allow it: mixed_dtypes=True, pool.mixed_dtypes in a recipe, --mixed-dtypes"
    return "convert the file to the dtypes of the others, or leave it out"


def _suggested_rename(missing: list[str], extra: list[str]) -> dict[str, str] | None:
    """A prefix map under which the names agree, if one prefix explains all of the difference."""
    if not missing or len(missing) != len(extra):
        return None
    wanted, all_missing = missing[0], set(missing)
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
        # The first name that does not fit ends the search, so that this is not quadratic in the number of names.
        if all((new + name[len(old) :] if name.startswith(old) else name) in all_missing for name in extra):
            # An empty `old` would put the prefix before every name of every file; dropping it everywhere
            # comes to the same.
            return {old: new} if old else {new: ""}
    return None


def _promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype that holds them all. Torch does not promote float8."""
    first, *others = dict.fromkeys(dtypes)
    for dtype in others:
        if 1 in (dtype.itemsize, first.itemsize):
            first = torch.float64 if torch.float64 in (dtype, first) else torch.float32
        else:
            first = torch.promote_types(first, dtype)
    return first
