"""Pydantic's findings in our words: each with its path and its line, all of them at once."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from stockpot.recipe.schema import Recipe
from stockpot.recipe.values import LM_EVAL, LmEval

Path = tuple[str, ...]
Lines = Mapping[Path, int]  # path of a value -> line of the file

_NOUNS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "text",
    "dict": "a mapping", "tuple": "a list", "model": "a mapping",
}  # fmt: skip
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
# What other libraries and earlier versions call a key of ours.
_USUAL = {
    "learning_rate": "lr", "wd": "weight_decay", "num_epochs": "epochs", "num_classes": "classes",
    "greedy_ties": "ties", "temperature": "beta",
}  # fmt: skip
_CONVERTED = "is no longer read; convert it to .npz first, as experiments/convert does, then write data.arrays"
_GONE = {
    ("data", "idx"): _CONVERTED,
    ("data", "cifar"): _CONVERTED,
    ("model", "clip"): "is no longer built here; use model.open_clip with the OpenCLIP name of the model",
    ("output", "tensorboard"): "is now one of several trackers; write track: tensorboard",
    ("finetune", "parallel"): "is gone; start the same command several times, and each takes trials that are free",
}


def problems(error: ValidationError, content: Any, lines: Lines) -> list[str]:
    """One line per problem, in the order of the recipe; `content` is what was validated."""
    by_path: dict[Path, list[dict[str, Any]]] = {}
    for found in error.errors(include_url=False):
        path = _path(found["loc"], content, found["type"] == "missing")
        by_path.setdefault(path, []).append(dict(found))
    return [
        _said(path, found) + _where(path, lines)
        for path, found in by_path.items()
        if not (_only_echoes(found) and any(len(p) > len(path) and p[: len(path)] == path for p in by_path))
    ]


def _path(loc: tuple[int | str, ...], content: Any, missing: bool) -> Path:
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


def _where(path: Path, lines: Lines) -> str:
    """The line of the value, or of what it would stand in; nothing where the recipe is not a file."""
    known = (lines.get(path[:length]) for length in range(len(path), 0, -1))
    line = next((line for line in known if line is not None), None)
    return "" if line is None else f" (line {line})"


def _said(path: Path, all_found: list[dict[str, Any]]) -> str:
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


def _known(path: Path) -> list[str]:
    """The keys of the section at a path."""
    section: type[BaseModel] | None = Recipe
    for step in path:
        if section is not None and step in section.model_fields:
            section = model_in(section.model_fields[step].annotation)
        elif step == LM_EVAL:
            section = LmEval
    return list(section.model_fields) if section is not None else []


def _suggest(path: Path) -> str:
    key, known = path[-1], _known(path[:-1])
    if path in _GONE:
        return f"{'.'.join(path)} {_GONE[path]}"
    close = nearest(key, known) or (_USUAL.get(key) if _USUAL.get(key) in known else None)
    if close is not None:
        return f"did you mean {close}?"
    for name in sorted(Recipe.model_fields, key=lambda name: name != "output"):
        if key in _known((name,)):
            return f"did you mean {name}.{key}?"
    return f"known here: {', '.join(known)}"
