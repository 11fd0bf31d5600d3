"""Where in a saved object the weights are.

Trainers wrap the weights: `{"state_dict": ..., "optimizer": ..., "epoch": 3}`. Raw weights are preferred
over moving averages, because that is what all ingredients of a pool have in common; `key="ema"` asks for
the average."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from stockpot.pool.source import listed, refusal

RAW_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights", "net", "network", "params")
EMA_KEYS = (
    *("state_dict_ema", "model_ema", "ema_state_dict", "model_ema_state_dict", "ema_model", "ema_model_state_dict"),
    *("ema", "ema_weights", "params_ema"),
)
_DEPTH = 3  # {"checkpoint": {"model": {"state_dict": ...}}} is as deep as real files go
_CLEARLY = 10  # times as many numbers: then it is clear which of two places has the weights

Weights = tuple[Mapping[Any, Any], str | None]  # tensors by name, and the dotted path to them; None: the object itself


def find_weights(saved: object, key: str | None, path: Path) -> Weights:
    if key is not None:
        return _by_key(saved, key, path)
    nested = dict(_nested(saved, (), path))
    if nested and _outweighs(saved, nested, "", path):
        nested = {}
    if nested:
        place = min(nested, key=is_average)  # raw ones first
        return nested[place], place
    if isinstance(saved, Mapping) and _holds_tensors(saved):
        return saved, None
    items = saved.items() if isinstance(saved, Mapping) else ()
    inside = [shown_key(name) for name, inner in items if _holds_tensors(inner)]
    expected = "a mapping of names to tensors, at the top or under one of " + ", ".join(RAW_KEYS)
    fix = f"name the place of the weights, for example key={(inside or ['trainer.model'])[0]!r}"
    raise refusal(path, expected, _outline(saved), fix)


def is_average(key: str | None) -> bool:
    """Whether a dotted path leads to averaged weights."""
    return key is not None and any(part in EMA_KEYS for part in key.split("."))


def shown_key(key: object) -> str:
    """A key as text. Not every object's own text is short: that of a storage lists all of its numbers."""
    return str(key) if isinstance(key, (str, bytes, int, float, bool)) else f"a key of type {type(key).__name__}"


def _by_key(saved: object, key: str, path: Path) -> Weights:
    nested = dict(_nested(saved, (), None))
    averages = [place for place in nested if is_average(place)]
    found = _follow(saved, key)
    if found is None and key == "ema" and averages:
        key, found = averages[0], nested[averages[0]]
    if isinstance(found, Mapping) and _holds_tensors(found):
        return found, key
    what = f"nothing there, in {_outline(saved)}" if found is None else f"{_outline(found)} there"
    fix = f"use one of the keys with weights: {', '.join(nested)}" if nested else "open the file without a key"
    raise refusal(path, f"weights under the key {key!r}", what, fix)


def _nested(saved: object, above: tuple[str, ...], path: Path | None) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Every place with weights that a known key leads to, the preferred first. With a `path`, doubts are errors."""
    if not isinstance(saved, Mapping) or len(above) >= _DEPTH:
        return
    for name in (*RAW_KEYS, *EMA_KEYS):
        inner = saved.get(name)
        if not isinstance(inner, Mapping):
            continue
        place = ".".join((*above, name))
        deeper = dict(_nested(inner, (*above, name), path))
        if deeper and not _outweighs(inner, deeper, place, path):
            yield from deeper.items()
        elif _holds_tensors(inner):
            yield place, inner


def _outweighs(saved: object, nested: Mapping[str, Mapping[Any, Any]], place: str, path: Path | None) -> bool:
    """Whether the weights are a mapping's own tensors, and what is nested in it is something else.

    A score or the state of a random generator beside the weights is no reason to doubt, but weights that stand beside
    a table of settings under `params` must not be passed over.
    """
    own = _numbers(saved.values()) if isinstance(saved, Mapping) else 0
    below, most = max(((key, _numbers(inner.values())) for key, inner in nested.items()), key=lambda pair: pair[1])
    if path is not None and own and most < own * _CLEARLY and own < most * _CLEARLY:
        where = f"under {place!r}" if place else "at the top"
        fix = f"name the place of the weights, for example key={below!r}, or save them in a file of their own"
        raise refusal(path, "weights in one place", f"tensors {where} and about as many numbers under {below!r}", fix)
    return own > 0 and own >= most * _CLEARLY


def _numbers(values: Iterable[object]) -> int:
    """How many floating-point numbers there are in tensors that are no single number."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(Tensor.numel(t) for t in tensors if t.dtype.is_floating_point and Tensor.dim(t) and Tensor.numel(t) > 1)


def _follow(saved: object, key: str) -> object:
    """The object at a dotted path; a key that itself contains dots is found too."""
    if not isinstance(saved, Mapping):
        return None
    parts = key.split(".")
    ways = ((".".join(parts[:n]), ".".join(parts[n:])) for n in range(1, len(parts)))
    inner = (_follow(saved[head], rest) for head, rest in ways if head in saved)
    found: object = saved[key] if key in saved else next((thing for thing in inner if thing is not None), None)
    return found


def _holds_tensors(thing: object) -> bool:
    return isinstance(thing, Mapping) and any(isinstance(value, Tensor) for value in thing.values())


def _outline(thing: object) -> str:
    if not isinstance(thing, Mapping):
        return f"an object of type {type(thing).__name__}"
    if not thing:
        return "an empty mapping"
    return "a mapping with the keys " + listed([shown_key(key)[:60] for key in thing], 8)
