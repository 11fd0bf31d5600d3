"""Whether a model takes a pool's tensors, and which prefix to replace if its names are others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from stockpot.errors import TaskError

SHOWN = 8  # names listed in one message
_ALIKE = 4  # places considered for one tensor
_TRIED = 16  # candidates that are looked at closely

Shapes = Mapping[str, tuple[int, ...]]


class HasShape(Protocol):
    @property
    def shape(self) -> Any: ...


@dataclass(frozen=True)
class Differences:
    """How a model and a pool differ, apart from tied names and counters. Empty when they fit."""

    lacks: tuple[str, ...]  # in the pool, not in the model
    extra: tuple[str, ...]  # in the model, not in the pool
    shapes: tuple[str, ...]  # in both with other shapes, said in words
    rename: dict[str, str] | None  # prefixes, old to new, that would help
    left_over: int = 0  # tensors of the pool that would still have no place then

    def __bool__(self) -> bool:
        return bool(self.lacks or self.extra or self.shapes)

    def sentences(self) -> list[str]:
        found = []
        if self.lacks:
            found.append(f"the model lacks {len(self.lacks)}: {_some(self.lacks)}")
        if self.extra:
            found.append(f"the model has {len(self.extra)} more: {_some(self.extra)}")
        if self.shapes:
            found.append(f"{len(self.shapes)} with other shapes: {_some(self.shapes, '; ')}")
        return found

    def fix(self) -> str:
        if self.rename is not None:
            prefixes = in_yaml(self.rename)
            rest = f"; {self.left_over} would still not fit" if self.left_over else ""
            return f"open the pool with rename={prefixes} (in a recipe, pool.rename: {prefixes}){rest}"
        if self.shapes and not self.lacks and not self.extra:
            return "build the model with the sizes it was fine-tuned with (number of classes, vocabulary)"
        return "build the model exactly as it was fine-tuned, or open the pool with rename= or key="


def check_names(model: nn.Module, specs: Mapping[str, HasShape]) -> None:
    """The model must take exactly the pool's tensors, apart from tied names and counters."""
    found = differences(model, specs)
    if found:
        raise TaskError.of(
            f"model {type(model).__name__}",
            expected=f"the pool's {len(specs)} tensors",
            found=";\n  ".join(found.sentences()),
            fix=found.fix(),
        )


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors into the model by name, also into buffers that it never saves, which torch's own loader skips."""
    # Not strict: names that the model ties to each other may be stored once.
    model.load_state_dict({name: tensors[name] for name in tensors}, strict=False)
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in tensors and name not in saved:
            buffer.copy_(tensors[name])


def differences(model: nn.Module, specs: Mapping[str, HasShape]) -> Differences:
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    holds = state | dict(model.named_buffers(remove_duplicate=False))  # also buffers that are never saved
    lacks = tuple(name for name in specs if name not in holds)
    given = {_place(state[name]) for name in specs if name in state}
    extra = tuple(
        name
        for name, value in state.items()
        if name not in specs
        and not name.endswith("num_batches_tracked")
        and (value.numel() == 0 or _place(value) not in given)
    )
    shapes = tuple(
        f"{name}: model {tuple(holds[name].shape)}, pool {tuple(spec.shape)}"
        for name, spec in specs.items()
        if name in holds and tuple(holds[name].shape) != tuple(spec.shape)
    )
    pool = {name: tuple(spec.shape) for name, spec in specs.items()}
    places = {name: tuple(value.shape) for name, value in holds.items()}
    rename = suggest_rename(pool, places) if lacks and extra else None
    return Differences(lacks, extra, shapes, rename, 0 if rename is None else left_over(pool, places, rename))


def _place(value: Tensor) -> tuple[Any, ...]:
    # Tensors without memory all have address 0.
    where = value.untyped_storage()._cdata if value.is_meta else value.data_ptr()
    return value.device, where, value.storage_offset(), tuple(value.shape), value.stride()


def _some(items: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + more


def suggest_rename(pool: Shapes, model: Shapes) -> dict[str, str] | None:
    """The shortest map of prefixes, old to new, that gives more of the pool a place in the model; None if none does."""
    strangers = [name for name in pool if name not in model]
    by_ending: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in model.items():
        if name not in pool:
            for ending in _endings(name):
                by_ending.setdefault((ending, shape), []).append(name)
    candidates: Counter[tuple[tuple[str, str], ...]] = Counter()
    for name in strangers:
        # The longest common ending leaves the shortest prefixes.
        common = next((e for e in _endings(name) if (e, pool[name]) in by_ending), "")
        for there in by_ending.get((common, pool[name]), ())[:_ALIKE]:
            old, new = name.removesuffix(common), there.removesuffix(common)
            candidates[((old, new),)] += 1
            if not old:  # a prefix for all names, or only for those that have no place yet
                firsts = dict.fromkeys(f"{n.partition('.')[0]}{'.' if '.' in n else ''}" for n in strangers)
                candidates[tuple((first, new + first) for first in firsts)] += 1
    best, most = None, _placed(pool, model, {})
    for candidate, _ in candidates.most_common(_TRIED):
        placed = _placed(pool, model, dict(candidate))
        if placed > most or (placed == most and best is not None and len(candidate) < len(best)):
            best, most = dict(candidate), placed
    return best


def left_over(pool: Shapes, model: Shapes, rename: Mapping[str, str]) -> int:
    """Tensors of the pool that still have no place after renaming."""
    return len(pool) - _placed(pool, model, rename)


def in_yaml(rename: Mapping[str, str]) -> str:
    """As it is written in a recipe, and just as well in Python."""
    return "{" + ", ".join(f"{old!r}: {new!r}" for old, new in rename.items()) + "}"


def _endings(name: str) -> list[str]:
    """The name and what is left of it after each dot, longest first."""
    parts = name.split(".")
    return [".".join(parts[cut:]) for cut in range(len(parts))]


def _placed(pool: Shapes, model: Shapes, rename: Mapping[str, str]) -> int:
    """How many tensors have a place of their own shape once the longest fitting prefix is replaced."""
    places: dict[str, Any] = {}
    for name, shape in pool.items():
        old = max((o for o in rename if name.startswith(o)), key=len, default=None)
        new = name if old is None else rename[old] + name[len(old) :]
        if model.get(new) == shape:
            places[new] = name
    return len(places)
