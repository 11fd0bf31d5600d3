"""Batches are trees: tensors inside tuples, lists and mappings, as `DataLoader` and tokenizers make them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf; containers keep their types where they can be rebuilt."""
    if isinstance(tree, Mapping):
        return _mapping(tree, {key: map_tree(function, value) for key, value in tree.items()})
    if isinstance(tree, tuple):
        mapped = [map_tree(function, value) for value in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
    if isinstance(tree, list):
        return [map_tree(function, value) for value in tree]
    return function(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    return map_tree(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with the Python expression that reaches it, such as `['labels']` or `[0]`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, (tuple, list)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


def refill(tree: Any, values: Iterable[Any]) -> Any:
    """The same tree with its leaves replaced, in the order of `leaves`."""
    remaining = iter(values)
    return map_tree(lambda _: next(remaining), tree)


def _mapping(like: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(like) is dict or not isinstance(like, MutableMapping):
        return values
    # A tokenizer's BatchEncoding is read through attributes by user code, so its type must survive.
    rebuilt = copy.copy(like)
    for key, value in values.items():
        rebuilt[key] = value
    return rebuilt
