"""Whether a model takes a pool's tensors, and which prefix to replace if its names are others.

From version 5 on, transformers gives some models' tensors other names in memory than in files, and joins some of them.
A pool has the names of files, so those are asked for here, and everything else speaks of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stockpot import ranks

SHOWN = 8  # names listed in one message
_ALIKE = 4  # places considered for one tensor
_TRIED = 16  # candidates that are looked at closely
_LONGEST, _DEEPEST = 500, 20  # letters and parts of a name: with more, a stranger's file could keep this busy for ever
_FIRSTS = 50  # first parts of names; with more of them, none gets a prefix of its own

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Differences:
    """How a model and a pool differ, apart from tied names and counters. Empty when they fit."""

    lacks: tuple[str, ...]  # in the pool, not in the model
    extra: tuple[str, ...]  # in the model, not in the pool
    shapes: tuple[str, ...]  # in both with other shapes, said in words
    rename: dict[str, str] | None  # prefixes, old to new, that would help
    left_over: int = 0  # tensors of the pool that would still have no place then
    joined: bool = False  # whether the model has in one tensor what its files have in several

    def __bool__(self) -> bool:
        return bool(self.lacks or self.extra or self.shapes)

    def sentences(self) -> list[str]:
        kinds: tuple[tuple[str, Sequence[str], str], ...] = (
            ("the model lacks {}", self.lacks, ", "),
            ("the model has {} more", self.extra, ", "),
            ("{} with other shapes", self.shapes, "; "),
        )
        found = []
        for words, names, separator in kinds:
            more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
            if names:
                found.append(f"{words.format(len(names))}: {separator.join([*names[:SHOWN], *more])}")
        return found

    def fix(self) -> str:
        if self.rename is not None:
            # As it is written in a recipe, and just as well in Python.
            prefixes = "{" + ", ".join(f"{old!r}: {new!r}" for old, new in self.rename.items()) + "}"
            rest = f"; {self.left_over} would still not fit" if self.left_over else ""
            return f"open the pool with rename={prefixes} (in a recipe, pool.rename: {prefixes}){rest}"
        if self.joined:
            return (
                "mix such checkpoints by `stockpot average`; weights cannot be learned yet for a model whose tensors"
                " transformers joins while it loads them, such as those of experts"
            )
        if self.shapes and not self.lacks and not self.extra:
            return "build the model with the sizes it was fine-tuned with (number of classes, vocabulary)"
        return "build the model exactly as it was fine-tuned, or open the pool with rename= or key="


_KNOWN: WeakKeyDictionary[nn.Module, tuple[dict[str, str], frozenset[str]]] = WeakKeyDictionary()


def file_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Of a pool's names those that the model has under other ones, with these."""
    own = {*model.state_dict(), *dict(model.named_buffers(remove_duplicate=False))}
    strangers = [name for name in names if name not in own]
    whole = _saved(model)[0] if strangers else {}
    return {name: whole[name] for name in strangers if name in whole}


def by_file_names(model: nn.Module, names: Iterable[str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A model's tensors, given by its own names, under those that a pool has for them."""
    other = {own: name for name, own in file_names(model, names).items()}
    return {other.get(name, name): value for name, value in tensors.items()}


def parts_in_files(model: nn.Module) -> frozenset[str]:
    """Names in files of what is joined in memory, such as the single experts of many."""
    return _saved(model)[1]


def _saved(model: nn.Module) -> tuple[dict[str, str], frozenset[str]]:
    """Names in files: of whole tensors, with the model's own; and of parts."""
    library = sys.modules.get("transformers.core_model_loading")  # it is there where such a model is
    convert = getattr(library, "revert_weight_conversion", None)
    if convert is None or not hasattr(model, "save_pretrained"):
        return {}, frozenset()
    if model not in _KNOWN:
        state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        blank = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
        try:
            saved = convert(model, dict(blank))
        except Exception:  # an inner function of that library, which another version may have changed
            saved = {}
        own = {id(value): name for name, value in blank.items()}
        whole = {name: own[id(value)] for name, value in saved.items() if id(value) in own}
        _KNOWN[model] = whole, frozenset(saved.keys() - whole.keys() - blank.keys())
    return _KNOWN[model]


def is_quantised(tensor: Tensor) -> bool:
    """Whether these are codes and not numbers, as far as torch says: integers, or a tensor class of some library."""
    return not (tensor.is_floating_point() or tensor.is_complex()) or type(ranks.local(tensor).data) is not Tensor


def quantised_weights(model: nn.Module, specs: Mapping[str, Any]) -> frozenset[str]:
    """Weights of which the pool has numbers and the model codes."""
    return frozenset(
        name
        for name, weight in by_file_names(model, specs, dict(model.named_parameters(remove_duplicate=False))).items()
        if name in specs and specs[name].dtype.is_floating_point and is_quantised(weight)
    )


def left_out(model: nn.Module, spare: Collection[str]) -> list[str]:
    """Of the tensors that a model may lack, those that it does lack."""
    holds = {*model.state_dict(), *dict(model.named_buffers(remove_duplicate=False))} if spare else set()
    return sorted(name for name in spare if name not in holds and name not in file_names(model, [name]))


def differences(
    model: nn.Module, specs: Mapping[str, Any], without: Iterable[str] = (), spare: Collection[str] = ()
) -> Differences:
    """Between a model and a pool's tensors, given as anything with a shape; what `without` names is not compared, nor
    what its module has beside it. The model may lack what is `spare`."""
    absent = {*left_out(model, spare)}
    specs = {name: spec for name, spec in specs.items() if name not in absent}
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    state = by_file_names(model, specs, state)
    if without := tuple(without):
        modules = {name.rpartition(".")[0] for name in without}
        specs = {name: spec for name, spec in specs.items() if name not in without}
        state = {name: value for name, value in state.items() if name in specs or not _inside(name, modules)}
    holds = state | dict(model.named_buffers(remove_duplicate=False))  # also buffers that are never saved
    pool, places = ({name: tuple(value.shape) for name, value in each.items()} for each in (specs, holds))
    given = {_place(state[name]) for name in specs if name in state}
    lacks = tuple(name for name in pool if name not in holds)
    extra = tuple(
        name
        for name, value in state.items()
        if name not in pool and not name.endswith("num_batches_tracked")
        # Tensors without memory are all in one place, and tied to nothing.
        if value.numel() == 0 or _place(value) not in given
    )
    other = (name for name, shape in pool.items() if places.get(name, shape) != shape)
    shapes = tuple(f"{name}: model {places[name]}, pool {pool[name]}" for name in other)
    joined = not parts_in_files(model).isdisjoint(lacks)
    rename = suggest_rename(pool, places) if lacks and extra and not joined else None
    return Differences(lacks, extra, shapes, rename, len(pool) - placed(pool, places, rename or {}), joined)


def fill(model: nn.Module, specs: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Put a pool's tensors into a model that takes them, also into buffers that it never saves itself."""
    own = file_names(model, specs)
    given = ((own.get(name, name), tensor) for name, tensor in tensors)
    if ranks.hold_parts(model):
        ranks.fill_model(model, given)
        return
    state = dict(given)
    model.load_state_dict(state, strict=False)  # not strict: names that the model ties may be stored once
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in state and name not in saved:
            buffer.copy_(state[name])


def _inside(name: str, modules: set[str]) -> bool:
    return any(name[:at] in modules for at, sign in enumerate(name) if sign == ".")


def _place(value: Tensor) -> tuple[Any, ...]:
    value = ranks.local(value)
    where = value.untyped_storage()._cdata if value.is_meta else value.data_ptr()
    return value.device, where, value.storage_offset(), tuple(value.shape), value.stride()


def suggest_rename(pool: Shapes, model: Shapes) -> dict[str, str] | None:
    """The shortest map of prefixes, old to new, that gives more of the pool a place in the model; None if none does."""
    strangers = [name for name in pool if name not in model]
    by_ending: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in model.items():
        if name not in pool:
            for ending in _endings(name):
                by_ending.setdefault((ending, shape), []).append(name)
    firsts = dict.fromkeys(f"{name.partition('.')[0]}{'.' if '.' in name else ''}" for name in strangers)
    candidates: Counter[tuple[tuple[str, str], ...]] = Counter()
    for name in strangers:
        # The longest common ending leaves the shortest prefixes.
        common = next((e for e in _endings(name) if (e, pool[name]) in by_ending), "")
        for there in by_ending.get((common, pool[name]), ())[:_ALIKE]:
            old, new = name.removesuffix(common), there.removesuffix(common)
            candidates[((old, new),)] += 1
            if not old and len(firsts) <= _FIRSTS:  # a prefix for all names, or only for those that have no place yet
                candidates[tuple((first, new + first) for first in firsts)] += 1
    best, most = None, placed(pool, model, {})
    for candidate, _ in candidates.most_common(_TRIED):
        found = placed(pool, model, dict(candidate))
        if found > most or (found == most and best is not None and len(candidate) < len(best)):
            best, most = dict(candidate), found
    return best


def _endings(name: str) -> list[str]:
    """The name and what is left of it after each dot, longest first; nothing of what no model has."""
    parts = name.split(".") if len(name) <= _LONGEST else []
    return [".".join(parts[cut:]) for cut in range(max(0, len(parts) - _DEEPEST), len(parts))]


def placed(pool: Shapes, model: Shapes, rename: Mapping[str, str]) -> int:
    """How many tensors have a place of their own shape once the longest fitting prefix is replaced."""
    places = set()
    for name, shape in pool.items():
        old = max((prefix for prefix in rename if name.startswith(prefix)), key=len, default=None)
        new = name if old is None else rename[old] + name[len(old) :]
        if model.get(new) == shape:
            places.add(new)
    return len(places)
