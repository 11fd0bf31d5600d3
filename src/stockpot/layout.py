"""Which tensors are mixed, and which coefficient group each of them has."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stockpot.errors import LayoutError
from stockpot.pool import Pool, PoolFacts
from stockpot.pool.source import mixing_dtype as mixing_dtype  # part of this interface

# Why a tensor is not mixed.
FROZEN = "frozen"  # identical in all ingredients: copied through
EXCLUDED = "excluded"  # the user's patterns: taken from the donor
INTEGER = "integer"  # integers and booleans: taken from the heaviest ingredient, never averaged
ABSENT = "absent"  # of adapters' base, changed by none and lacked by the model, such as another head: left out
STATISTIC = "statistic"  # running statistics of normalisation layers: recalibrated, averaged or copied

WHOLE_MODEL = "model"
_NUMBERED = re.compile(r"\d+|.*\D\d+")  # "7", "layer1", "encoder_layer_3"


@dataclass(frozen=True)
class Layout:
    """G coefficient groups over the tensors of a pool. Build one with `Layout.of`."""

    groups: tuple[str, ...]  # G names
    group_of: Mapping[str, int]  # mixed tensor -> group
    kept: Mapping[str, str]  # tensor that is not mixed -> reason
    donor: int = 0  # ingredient that excluded tensors come from
    tied: tuple[tuple[str, ...], ...] = ()  # names that hold one tensor; mixed once, kept equal
    granularity: str = "tensor"

    @classmethod
    def of(
        cls,
        pool: Pool,
        granularity: str | Callable[[str], str] = "tensor",
        *,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        donor: int | str = 0,
        facts: PoolFacts | None = None,
        absent: Collection[str] = (),
    ) -> Layout:
        """Assign every tensor of `pool` to a group, or keep it out of the mixture.

        `granularity` is `model`, `block`, `module`, `tensor`, or a function from tensor name to group name.
        `include` and `exclude` are shell patterns on tensor names (`"head.*"`); what they leave out is taken
        from the ingredient `donor` (an index or a name). `facts` tells which tensors are frozen or tied, `absent`
        which of the base's (`pool.spare`) are no part of the soup.
        """
        group_name = _grouping(granularity)
        present = (tuple(name for name in names if name not in absent) for names in (facts.tied if facts else ()))
        tied = tuple(names for names in present if len(names) > 1)
        first_of = {name: names[0] for names in tied for name in names}
        left_out = _left_out(pool, include, exclude, tied)
        frozen = _frozen(pool, facts)
        kept: dict[str, str] = {}
        wanted: dict[str, str] = {}  # mixed tensor -> group name
        for name, spec in pool.specs.items():
            if name in absent:
                kept[name] = ABSENT
            elif not (spec.dtype.is_floating_point or spec.dtype.is_complex):
                # Indices and masks are the same in all; only counters, which are single numbers, may differ.
                table = len(spec.shape) > 1 and spec.dtype not in (torch.int64, torch.bool)
                if table and name not in left_out and _differs(pool, name, facts):
                    raise LayoutError.of(
                        f"tensor {name}",
                        expected="weights that can be averaged number by number",
                        found=f"{spec}, codes of quantised weights by their look, that differ between the ingredients",
                        fix=f"dequantise the checkpoints, or keep one ingredient's with exclude={name!r}",
                    )
                kept[name] = INTEGER
            elif name in pool.statistics:
                kept[name] = STATISTIC
            elif name in left_out:
                kept[name] = EXCLUDED
            elif name in frozen or spec.numel == 0:
                kept[name] = FROZEN
            elif spec.dtype.is_complex:
                raise LayoutError.of(
                    f"tensor {name}",
                    expected="real numbers",
                    found="complex ones that differ between the ingredients",
                    fix=f"keep one ingredient's with exclude={name!r}, or store real and imaginary parts",
                )
            else:
                # Tied tensors share the group of their first name, so that they stay equal.
                wanted[name] = group_name(first_of.get(name, name))
        if not wanted:
            counts = ", ".join(f"{count} {reason}" for reason, count in Counter(kept.values()).items())
            fix = "widen include or exclude"
            raise LayoutError.of("layout", "at least one tensor to mix", f"none of {len(pool.specs)} ({counts})", fix)
        groups = tuple(dict.fromkeys(wanted.values()))
        index = {group: i for i, group in enumerate(groups)}
        return cls(
            groups=groups,
            group_of={name: index[group] for name, group in wanted.items()},
            kept=kept,
            donor=_donor(pool, donor),
            tied=tied,
            granularity=granularity if isinstance(granularity, str) else "custom",
        )

    def __len__(self) -> int:
        return len(self.groups)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        return cls(
            groups=tuple(value["groups"]),
            group_of={str(k): int(v) for k, v in value["group_of"].items()},
            kept={str(k): str(v) for k, v in value["kept"].items()},
            donor=int(value["donor"]),
            tied=tuple(tuple(names) for names in value["tied"]),
            granularity=str(value["granularity"]),
        )


def by_block(name: str) -> str:
    """The transformer layer or residual stage a tensor belongs to.

    That is the name up to its first numbered part: `encoder.layer.3.attention.query.weight` -> `encoder.layer.3`,
    `layer1.0.conv1.weight` -> `layer1`. A tensor outside any numbered part stays with its module.
    """
    parts = name.split(".")
    # A root such as `wav2vec2` or `gpt2` has a number but is no block when numbered layers stand below it.
    below = [part.isdigit() for part in parts[1:-1]]
    skip_root = not parts[0].isdigit() and any(below) and not below[0]
    for position, part in enumerate(parts[:-1]):
        if position == 0 and skip_root:
            continue
        if _NUMBERED.fullmatch(part):
            return ".".join(parts[: position + 1])
    return by_module(name)


def by_module(name: str) -> str:
    return name.rpartition(".")[0] or name


GRANULARITIES: Mapping[str, Callable[[str], str]] = {
    "model": lambda _: WHOLE_MODEL,
    "block": by_block,
    "module": by_module,
    "tensor": lambda name: name,
}


def _grouping(granularity: str | Callable[[str], str]) -> Callable[[str], str]:
    if isinstance(granularity, str) and granularity in GRANULARITIES:
        return GRANULARITIES[granularity]
    if isinstance(granularity, str):
        expected = f"one of {', '.join(GRANULARITIES)}, or a function from tensor name to group name"
        fix = "use 'tensor' for the paper's layer-wise soups, 'model' for one coefficient per ingredient"
        raise LayoutError.of(f"granularity {granularity!r}", expected=expected, found="an unknown word", fix=fix)

    def checked(name: str) -> str:
        group: object = granularity(name)  # a user's function may return anything
        if not isinstance(group, str):
            fix = "return a string for every tensor name"
            raise LayoutError.of(f"granularity function for {name!r}", "the name of a group", repr(group), fix)
        return group

    return checked


def _differs(pool: Pool, name: str, facts: PoolFacts | None) -> bool:
    """Whether the ingredients have different tensors of this name."""
    if facts is not None:
        return name not in facts.frozen
    first = pool.tensor(0, name)
    return any(not torch.equal(pool.tensor(k, name), first) for k in range(1, len(pool)))


def _frozen(pool: Pool, facts: PoolFacts | None) -> frozenset[str]:
    """What is copied through. Identical ingredients are mixed all the same: any soup of them is one of them."""
    if facts is None:
        return frozenset()
    floating = [name for name, spec in pool.specs.items() if spec.dtype.is_floating_point and spec.numel]
    mixable = [name for name in floating if name not in pool.statistics]
    return facts.frozen.difference(mixable) if facts.frozen.issuperset(mixable) else facts.frozen


def _left_out(
    pool: Pool, include: Iterable[str] | None, exclude: Iterable[str] | None, tied: Iterable[tuple[str, ...]]
) -> set[str]:
    # Names of one tensor go together: half of a tied pair from a donor would tear it apart.
    together = {name: set(names) for names in tied for name in names}

    def matching(option: str, patterns: Iterable[str]) -> set[str]:
        listed = [patterns] if isinstance(patterns, str) else list(patterns)
        found = [_matching(pool, option, pattern) for pattern in listed]
        return {other for names in found for name in names for other in together.get(name, {name})}

    left_out = set() if include is None else set(pool.specs) - matching("include", include)
    return left_out | matching("exclude", exclude or ())


def _matching(pool: Pool, option: str, pattern: str) -> set[str]:
    names = set(fnmatch.filter(pool.specs, pattern))
    if not names:
        fix = f"names look like: {', '.join(list(pool.specs)[:5])}"
        raise LayoutError.of(f"{option} pattern {pattern!r}", "a pattern that matches tensor names", "no match", fix)
    return names


def _donor(pool: Pool, donor: int | str) -> int:
    if isinstance(donor, str) and donor in pool.names:
        return pool.names.index(donor)
    if isinstance(donor, int) and 0 <= donor < len(pool):
        return donor
    expected = f"an ingredient's name or an index from 0 to {len(pool) - 1}"
    fix = f"names are: {', '.join(pool.names[:5])}{', ...' if len(pool) > 5 else ''}"
    raise LayoutError.of(f"donor {donor!r}", expected=expected, found="no such ingredient", fix=fix)
