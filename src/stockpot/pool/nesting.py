"""Where in a saved object the weights are.

Trainers wrap the weights: `{"state_dict": ..., "optimizer": ..., "epoch": 3}`. Raw weights are preferred
over moving averages, because that is what all ingredients of a pool have in common; `key="ema"` asks for
the average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stockpot.errors import CheckpointError, describe
from stockpot.pool.files import listed

RAW_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights", "net", "network", "params")
EMA_KEYS = (
    "state_dict_ema",
    "model_ema",
    "ema_state_dict",
    "model_ema_state_dict",
    "ema_model",
    "ema_model_state_dict",
    "ema",
    "ema_weights",
    "params_ema",
)
_DEPTH = 3  # {"checkpoint": {"model": {"state_dict": ...}}} is as deep as real files go


@dataclass(frozen=True)
class Weights:
    """A mapping with tensors and the dotted path to it (`None`: the object itself)."""

    tensors: Mapping[Any, Any]
    key: str | None
    others: tuple[str, ...]


def find_weights(saved: object, key: str | None, subject: str) -> Weights:
    nested = dict(_nested(saved, ()))
    raw = [path for path in nested if not _is_ema(path)]
    ema = [path for path in nested if _is_ema(path)]
    if key is not None:
        return _by_key(saved, key, nested, ema, subject)
    order = [*raw, *ema]
    if order:
        return Weights(nested[order[0]], order[0], tuple(order[1:]))
    if _holds_tensors(saved):
        assert isinstance(saved, Mapping)
        return Weights(saved, None, ())
    inside = (
        [shown_key(name) for name, inner in saved.items() if _holds_tensors(inner)]
        if isinstance(saved, Mapping)
        else []
    )
    raise CheckpointError(
        describe(
            subject,
            expected="a mapping of names to tensors, at the top or under one of " + ", ".join(RAW_KEYS),
            found=_outline(saved),
            fix=f"name the place of the weights, for example key={(inside or ['trainer.model'])[0]!r}",
        )
    )


def _by_key(
    saved: object, key: str, nested: Mapping[str, Mapping[Any, Any]], ema: list[str], subject: str
) -> Weights:
    found = _follow(saved, key)
    if found is None and key == "ema" and ema:
        key, found = ema[0], nested[ema[0]]
    others = tuple(path for path in nested if path != key)
    if _holds_tensors(found):
        assert isinstance(found, Mapping)
        return Weights(found, key, others)
    what = f"nothing there, in {_outline(saved)}" if found is None else f"{_outline(found)} there"
    fix = (
        f"use one of the keys with weights: {', '.join(nested)}" if nested else "open the file without a key"
    )
    raise CheckpointError(describe(subject, expected=f"weights under the key {key!r}", found=what, fix=fix))


def _nested(saved: object, path: tuple[str, ...]) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Every place with weights that a known key leads to, the preferred first."""
    if not isinstance(saved, Mapping) or len(path) >= _DEPTH:
        return
    for name in (*RAW_KEYS, *EMA_KEYS):
        inner = saved.get(name)
        if not isinstance(inner, Mapping):
            continue
        deeper = list(_nested(inner, (*path, name)))
        if deeper:
            yield from deeper
        elif _holds_tensors(inner):
            yield ".".join((*path, name)), inner


def _follow(saved: object, key: str) -> object:
    """The object at a dotted path; a key that itself contains dots is found too."""
    if not isinstance(saved, Mapping):
        return None
    if key in saved:
        found: object = saved[key]
        return found
    head, dot, rest = key.partition(".")
    while dot:
        if head in saved and (inner := _follow(saved[head], rest)) is not None:
            return inner
        more, dot, rest = rest.partition(".")
        head = f"{head}.{more}"
    return None


def _is_ema(path: str) -> bool:
    return any(part in EMA_KEYS for part in path.split("."))


def _holds_tensors(thing: object) -> bool:
    return isinstance(thing, Mapping) and any(isinstance(value, Tensor) for value in thing.values())


def shown_key(key: object) -> str:
    """A key as text. Not every object's own text is short: that of a storage lists all of its numbers."""
    return (
        str(key) if isinstance(key, (str, bytes, int, float, bool)) else f"a key of type {type(key).__name__}"
    )


def _outline(thing: object) -> str:
    if not isinstance(thing, Mapping):
        return f"an object of type {type(thing).__name__}"
    if not thing:
        return "an empty mapping"
    return "a mapping with the keys " + listed([shown_key(key)[:60] for key in thing], 8)
