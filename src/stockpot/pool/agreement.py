"""Whether checkpoints can be mixed with each other: everything that differs is said at once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from stockpot.errors import describe
from stockpot.names import placed, suggest_rename
from stockpot.pool.nesting import is_average
from stockpot.pool.source import Checkpoint, TensorSpec, dtype_name, listed, shown

Specs = Mapping[str, TensorSpec]
# Integers under these names are packed or scaled weights: GPTQ, AWQ, compressed-tensors, HQQ, quanto, MXFP4.
_PACKED = re.compile(r"(.*[._])?(q?weight|weight_packed|q_weight|w_q|_data|blocks|_packed_params)", re.IGNORECASE)
# What low-precision weights are multiplied with: scale, weight_scale_inv, SCB, weight.absmax, zero_point. The first
# part says of what; some of them mean the whole module.
_SCALE = re.compile(r"(.*?)_?(scales?(_inv|_weight)?|scb|absmax|quant_map|q?zeros|zero_points?)", re.IGNORECASE)
_PEFT_FACTOR = re.compile(r"(.+\.)?base_model\.model\..+\.lora_(A|B|embedding_A|embedding_B)(\..+)?")
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
    places = listed([f"{shown(checkpoint.path)} ({checkpoint.key})" for checkpoint in averaged])
    expected = "raw weights of every checkpoint, or averaged (EMA) ones of every"
    found = f"raw ones, and averaged ones in {len(averaged)} of {len(checkpoints)}: {places}"
    fix = "open the pool with key='ema' if all have averages, or leave these out"
    return [describe("the pool", expected=expected, found=found, fix=fix)]


def quantised(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """One text for each checkpoint whose weights are integers or scaled: averaging their codes gives nonsense."""
    expected = "weights that can be averaged number by number"
    fix = "dequantise them (save them as bfloat16 or float32), mix those, and quantise the soup"
    problems = []
    for checkpoint in checkpoints:
        names = [f"{name} ({dtype_name(checkpoint.specs[name].dtype)})" for name in _quantised_names(checkpoint.specs)]
        names += [name for name in checkpoint.ignored if name.endswith("_packed_params")]
        if names:
            found = f"quantised ones, which mean something only with their scales: {listed(names)}"
            problems.append(describe(shown(checkpoint.path), expected=expected, found=found, fix=fix))
    return problems


def bare_factors(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """What is wrong with LoRA factors that would be mixed as tensors: the mean of products is no product of means."""
    expected = "full checkpoints, or adapters in the folders that PEFT wrote (adapter_config.json beside the weights)"
    fix = "give the folders of the adapters and their base=, or merge them into full checkpoints (merge_and_unload)"
    return [
        describe(shown(one.path), expected, f"factors of LoRA adapters: {listed(names)}", fix)
        for one in checkpoints
        if (names := [name for name in one.specs if _PEFT_FACTOR.fullmatch(name)])
    ]


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
    """What is different, and what to do about it."""
    missing = [name for name in reference if name not in specs]
    extra = [name for name in specs if name not in reference]
    shapes, dtypes, floating = [], [], True
    for name, wanted in reference.items():
        own = specs.get(name, wanted)
        if own.shape != wanted.shape:
            shapes.append(f"{name} has {list(own.shape)} instead of {list(wanted.shape)}")
        if _kind(own.dtype, mixed_dtypes) != _kind(wanted.dtype, mixed_dtypes):
            dtypes.append(f"{name} is {dtype_name(own.dtype)} instead of {dtype_name(wanted.dtype)}")
            floating &= own.dtype.is_floating_point and wanted.dtype.is_floating_point
    sorts = {"name# missing": missing, "name# too many": extra, "other shape#": shapes, "other dtype#": dtypes}
    found = [
        f"{len(texts)} {what.replace('#', '' if len(texts) == 1 else 's')}: {listed(texts)}"
        for what, texts in sorts.items()
        if texts
    ]
    here, there = ({name: spec.shape for name, spec in each.items()} for each in (specs, reference))
    rename = suggest_rename(here, there) if len(missing) == len(extra) else None
    if rename is not None and placed(here, there, rename) == len(there):
        # With an empty prefix every name of every file would get one; to take it off everywhere comes to the same.
        rename = {rename[""]: ""} if "" in rename else rename
        return found, f"the names differ by a prefix only: open the pool with rename={rename}"
    if any("embed" in text for text in shapes) and not (missing or extra):
        more = "if tokens were added to its vocabulary, bring all to the same one first (resize_token_embeddings)"
        return found, f"leave this file out; or, {more}"
    if missing or extra or shapes:
        return found, "leave this file out, or check that it is a fine-tuned version of the same model"
    if floating:
        return found, "convert the file, or allow it: mixed_dtypes=True, pool.mixed_dtypes in a recipe, --mixed-dtypes"
    return found, "convert the file to the dtypes of the others, or leave it out"


def _promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype that holds them all. Torch does not promote float8."""
    first, *others = dict.fromkeys(dtypes)
    for dtype in others:
        if 1 in (dtype.itemsize, first.itemsize):
            first = torch.float64 if torch.float64 in (dtype, first) else torch.float32
        else:
            first = torch.promote_types(first, dtype)
    return first
