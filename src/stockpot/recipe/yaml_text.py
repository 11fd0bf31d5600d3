"""YAML as people expect it: no duplicate keys, `no` is a word, `1e-3` is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml

from stockpot.errors import RecipeError

_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2: PyYAML's own 1.1 reads `no` as false and `1e-3` as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is not a word; put it in quotes", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_REPLACED = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int")
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag not in (*_REPLACED, "tag:yaml.org,2002:timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    (_REPLACED[0], r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_REPLACED[2], r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        _REPLACED[1],
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
):
    # add_implicit_resolver tries patterns in this order, so a whole number is never read as a float.
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 16) if text.startswith("0x") else int(text)  # 010 is ten


_Loader.add_constructor(_REPLACED[2], _whole)


def parse(text: str, where: str) -> Any:
    """Plain values only; a syntax error says line and column."""
    try:
        return _values(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError(f"{where}: not valid YAML\n  {place}{said}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: not valid YAML\n  {error}") from error


def _values(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """How many values a node has when every alias is written out.

    A few lines of aliases to aliases can mean billions, and an alias may contain itself.
    """
    if id(node) in sizes:
        if sizes[id(node)] == 0:
            raise ValueError("an alias stands for something that contains it")
        return sizes[id(node)]
    sizes[id(node)] = 0  # under way
    inside: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        inside = list(node.value)
    elif isinstance(node, yaml.MappingNode):
        inside = [part for pair in node.value for part in pair]
    size = 1 + sum(_check_size(part, sizes) for part in inside)
    if size > _MOST_VALUES:
        raise ValueError(f"its aliases stand for more than {_MOST_VALUES:,} values")
    sizes[id(node)] = size
    return size


def dump(value: Any) -> str:
    """YAML that `parse` reads back as the same values."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if any(mark in text for mark in "\x85\u2028\u2029"):  # line ends PyYAML writes but does not read back
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=False)
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not read as the same text."""


_Dumper.yaml_implicit_resolvers = {
    first: [*resolvers, *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
}
