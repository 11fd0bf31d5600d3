"""From a file and `--set` overrides to a checked recipe.

YAML is read as people expect it: no duplicate keys, `no` is a word, `1e-3` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from stockpot import files
from stockpot.errors import RecipeError
from stockpot.recipe.problems import Lines, problems
from stockpot.recipe.schema import Recipe

_MOST = 2**20  # bytes; a recipe has fifteen lines
_MOST_VALUES, _DEEPEST = 100_000, 100


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Overrides are `section.key=value` with YAML values, applied before anything is checked."""
    file = Path(path)
    content, lines = _read(file)
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise RecipeError(f"{file}: expected sections such as pool, model and data, found {found}")
    return make_recipe(content, file.parent, overrides, str(file), lines)


def plain_yaml(path: Path) -> Any:
    """What another tool's file of YAML says, as plain values."""
    return _read(path)[0]


def _read(file: Path) -> tuple[Any, Lines]:
    if file.is_dir():
        raise RecipeError(f"{file}: a folder; give the recipe file itself")
    try:
        text = files.read_text(file, _MOST, follow=True)
    except FileNotFoundError as error:
        raise RecipeError(f"{file}: there is no such recipe") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not a text file, so not a recipe") from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file}: cannot be read: {error}") from error
    return parse(text, str(file))


def make_recipe(
    content: Mapping[str, Any],
    folder: str | Path,
    overrides: Iterable[str] = (),
    where: str = "recipe",
    lines: Lines | None = None,
) -> Recipe:
    """A recipe from plain values, as if it were written in a file in `folder`; `lines` of it are named in errors."""
    merged, known = dict(content), dict(lines or {})
    for override in overrides:
        keys = _replace(merged, override)
        known = {path: line for path, line in known.items() if path[: len(keys)] != keys}
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        found = problems(error, merged, known)
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise RecipeError(f"{where}: {count}\n" + "\n".join(f"  {line}" for line in found)) from error
    home = Path(folder).resolve()
    recipe._folder = home if recipe.base is None else (home / files.at_home(recipe.base)).resolve()
    return recipe


def _replace(content: dict[str, Any], override: str) -> tuple[str, ...]:
    """Put the value of `section.key=value` in its place, whose path comes back."""
    path, equals, text = override.partition("=")
    *sections, key = keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise RecipeError(f"--set {override}: expected key=value, such as method.lr=0.02")
    for name in sections:
        inner = content.get(name)
        if not isinstance(inner, dict | None):
            raise RecipeError(f"--set {override}: {name} is {inner!r}, which has no keys below it")
        content[name] = dict(inner or {})  # a copy: an alias may stand elsewhere too
        content = content[name]
    content[key] = parse(text, f"--set {override}")[0]
    return keys


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2: PyYAML's own 1.1 reads `no` as false and `1e-3` as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            wrong = "is not a word; put it in quotes" if not isinstance(key, str) else "appears twice"
            if not isinstance(key, str) or key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} {wrong}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {}
for _name, _first, _pattern in (
    ("merge", "<", r"<<"),
    ("null", ("~", "n", "N", ""), r"~|null|Null|NULL|"),
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?[0-9]+|0x[0-9a-fA-F]+"),  # before float, so that no whole number is read as one
    (
        "float",
        "-+0123456789.",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 16) if text.startswith("0x") else int(text)  # 010 is ten


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    """JSON writes what lies beyond 16 bits as two escapes, which YAML alone reads as two halves."""
    text = str(loader.construct_scalar(node))
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
_Loader.add_constructor("tag:yaml.org,2002:str", _text)


def parse(text: str, where: str) -> tuple[Any, Lines]:
    """Plain values, and the line of each; a syntax error says line and column."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = _counted_lines(node)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        said = " ".join(part for part in (error.context, error.problem) if part).replace("unexpected ", "")
        raise RecipeError(f"{where}: not valid YAML\n  {place}{said}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: not valid YAML\n  {error}") from error


def _counted_lines(root: yaml.Node) -> Lines:
    """On which line each value's key stands, every alias written out.

    A few lines of aliases to aliases can mean billions of values, and an alias may contain itself: both end here.
    """
    lines: dict[tuple[str, ...], int] = {}
    for number, (path, line) in enumerate(_lines(root, ()), start=1):
        if number > _MOST_VALUES:
            raise ValueError(f"its aliases stand for more than {_MOST_VALUES:,} values")
        lines[path] = line
    return lines


def _lines(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if len(path) > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} deep, or an alias stands for something that contains it")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _lines(key, (*path, ""))  # a key may be an alias too
            yield (*path, str(key.value)), key.start_mark.line + 1
            yield from _lines(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, str(index)), value.start_mark.line + 1
            yield from _lines(value, (*path, str(index)))
