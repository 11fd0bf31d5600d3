"""One searched hyperparameter: a value, a list of choices, or a range."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stockpot.errors import MethodError, describe

Value = int | float
Space = Value | list[Value] | tuple[Value, ...] | Mapping[str, Any]

_KEYS = ("min", "max", "scale")


@dataclass(frozen=True)
class Choices:
    values: tuple[Value, ...]

    def draw(self, source: random.Random, whole: bool) -> Value:  # noqa: ARG002
        return source.choice(self.values)


@dataclass(frozen=True)
class Range:
    low: Value
    high: Value
    log: bool = False

    def draw(self, source: random.Random, whole: bool) -> Value:
        if self.log:
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
            # exp(log(x)) may miss x by one rounding, and the ends are promises.
            value = min(max(value, self.low), self.high)
            return round(value) if whole else value
        if whole:
            return source.randint(math.ceil(self.low), math.floor(self.high))
        return source.uniform(self.low, self.high)


def parse(space: Space, name: str) -> Choices | Range:
    """`0.1` is fixed, `[0, 0.1]` are choices, `{"min", "max", "scale": "log" | "linear"}` is a range."""
    if isinstance(space, Mapping):
        return _range(space, name)
    if isinstance(space, (list, tuple)):
        if not space:
            raise _wrong(name, "at least one choice", "an empty list", "list the values, or give one")
        return Choices(tuple(_number(value, name) for value in space))
    return Choices((_number(space, name),))


def draw(space: Space, name: str, *, seed: int, number: int, whole: bool = False) -> Value:
    """Depends on the seed, the trial's number and the name alone: searching one more thing changes no other."""
    return parse(space, name).draw(random.Random(f"{seed}/{number}/{name}"), whole)


def _range(space: Mapping[str, Any], name: str) -> Range:
    unknown = [key for key in space if key not in _KEYS]
    if unknown or "min" not in space or "max" not in space:
        raise _wrong(
            name,
            "a range with min, max and perhaps scale",
            ", ".join(map(str, space)) or "an empty mapping",
            'write {"min": 1e-5, "max": 1e-3, "scale": "log"}',
        )
    low, high = _number(space["min"], name), _number(space["max"], name)
    scale = space.get("scale", "linear")
    if scale not in ("log", "linear"):
        raise _wrong(name, "scale 'log' or 'linear'", repr(scale), "use one of the two")
    if low > high:
        raise _wrong(name, "min <= max", f"{low} > {high}", "exchange the two")
    if scale == "log" and low <= 0:
        raise _wrong(name, "min > 0 for a log range", str(low), "raise min, or use scale 'linear'")
    return Range(low, high, scale == "log")


def _number(value: Any, name: str) -> Value:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise _wrong(name, "finite numbers", repr(value), "give a number, a list of numbers or a range")


def _wrong(name: str, expected: str, found: str, fix: str) -> MethodError:
    return MethodError(describe(f"space of {name}", expected=expected, found=found, fix=fix))
