"""From a file and `--set` overrides to a checked recipe.

YAML is read as people expect it: no duplicate keys, `no` is a word, `1e-3` is a number.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from stockpot import files
from stockpot.errors import RecipeError
from stockpot.recipe.schema import Recipe
from stockpot.recipe.values import LM_EVAL, LmEval

Keys = tuple[str, ...]
Lines = Mapping[Keys, int]  # path of a value -> line of the file

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


# ---- what is wrong with a recipe

_NOUNS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "text",
    "dict": "a mapping", "tuple": "a list", "model": "a mapping",
}  # fmt: skip
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
# What other libraries call a key of ours.
_USUAL = {"learning_rate": "lr", "wd": "weight_decay", "num_epochs": "epochs", "num_classes": "classes"}


def problems(error: ValidationError, content: Any, lines: Lines) -> list[str]:
    """One line per problem, in the order of the recipe; `content` is what was validated."""
    by_path: dict[Keys, list[dict[str, Any]]] = {}
    for found in error.errors(include_url=False):
        path = _path(found["loc"], content, found["type"] == "missing")
        by_path.setdefault(path, []).append(dict(found))
    return [
        _said(path, found) + _where(path, lines)
        for path, found in by_path.items()
        if not (_only_echoes(found) and any(len(p) > len(path) and p[: len(path)] == path for p in by_path))
    ]


def _path(loc: tuple[int | str, ...], content: Any, missing: bool) -> Keys:
    """The path as written in the recipe: what is no key of the content is pydantic's own name of a choice."""
    path: list[str] = []
    for number, step in enumerate(loc):
        here = content if isinstance(content, dict) else dict(enumerate(content)) if isinstance(content, list) else {}
        if step not in here and not (missing and number == len(loc) - 1):
            continue
        content = here.get(step)
        path.append(str(step))
    return tuple(path)


def _only_echoes(found: list[dict[str, Any]]) -> bool:
    """A list whose items were refused is also called too short, and a mapping is also called no word."""
    return all(
        one["type"] == "too_short" or (one["type"] != "value_error" and isinstance(one.get("input"), dict))
        for one in found
    )


def _where(path: Keys, lines: Lines) -> str:
    """The line of the value, or of what it would stand in; nothing where the recipe is not a file."""
    known = (lines.get(path[:length]) for length in range(len(path), 0, -1))
    line = next((line for line in known if line is not None), None)
    return "" if line is None else f" (line {line})"


def _said(path: Keys, all_found: list[dict[str, Any]]) -> str:
    name, found = ".".join(path) or "the recipe", all_found[0]
    value = found.get("input")
    if found["type"] == "extra_forbidden":
        return f"{name}: unknown key; {_suggest(path)}"
    if found["type"] == "missing":
        return f"{name}: required, but not there"
    for one in all_found:
        if one["type"] == "value_error":
            text = one["msg"].removeprefix("Value error, ")
            key = text.split(":", 1)[0]  # a section's own check may name the key below the section
            if key.split(".", 1)[0] in _known(path) and " " not in key:
                return ".".join((*path, text))
            return f"{name}: {text}" if path else text
    words = [w for one in all_found if one["type"] == "literal_error" for w in _words(one)]
    expected = dict.fromkeys(filter(None, map(_expected, all_found)))
    if not expected:
        return f"{name}: {found['msg'][:1].lower()}{found['msg'][1:]}, found {_short(value)}"
    close = nearest(value, words)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"{name}: expected {' or '.join(expected)}, found {_short(value)}{hint}"


def _expected(found: dict[str, Any]) -> str | None:
    kind, about = found["type"], found.get("ctx", {})
    if kind == "literal_error":
        return f"one of {', '.join(_words(found))}"
    if kind == "string_pattern_mismatch":  # the only pattern there is
        return "module:function"
    if about.get("class_name") == "PythonCode":
        return "{python: module:function}"
    for limit, sign in _SIGNS.items():
        if limit in about:
            return f"a value {sign} {about[limit]:g}"
    return _NOUNS.get(kind.split("_", 1)[0]) if kind.endswith(("_type", "_parsing", "_from_float")) else None


def _words(found: dict[str, Any]) -> list[str]:
    return [word.strip(" '") for word in found["ctx"]["expected"].replace(" or ", ", ").split(",")]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"a mapping with {', '.join(map(str, list(value)[:4]))}" if value else "an empty mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Letters in another order are the likeliest mistake (`lable`), then the end of a word."""
    text = str(word)
    close = difflib.get_close_matches(text, list(known), n=3)
    return max(close, key=lambda one: (sorted(one) == sorted(text), one[:1] == text[:1]), default=None)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone, among others or under names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(model_in, typing.get_args(annotation))), None)


def _known(path: Keys) -> list[str]:
    """The keys of the section at a path."""
    section: type[BaseModel] | None = Recipe
    for step in path:
        if section is not None and step in section.model_fields:
            section = model_in(section.model_fields[step].annotation)
        elif step == LM_EVAL:
            section = LmEval
    return list(section.model_fields) if section is not None else []


def _suggest(path: Keys) -> str:
    key, known = path[-1], _known(path[:-1])
    close = nearest(key, known) or (_USUAL.get(key) if _USUAL.get(key) in known else None)
    if close is not None:
        return f"did you mean {close}?"
    for name in sorted(Recipe.model_fields, key=lambda name: name != "output"):
        if key in _known((name,)):
            return f"did you mean {name}.{key}?"
    return f"known here: {', '.join(known)}"
