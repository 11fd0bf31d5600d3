"""Pydantic's findings in our words: each with its path and its line, all of them at once."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from stockpot.recipe.schema import Recipe
from stockpot.recipe.values import nearest

Lines = Mapping[tuple[str, ...], int]  # path of a value -> line of the file

_NOUNS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "dict": "a mapping",
    "tuple": "a list",
    "model": "a mapping",
}
# What other libraries call a key of ours.
_USUAL = {"learning_rate": "lr", "wd": "weight_decay", "num_epochs": "epochs", "num_classes": "classes"}
_LIMITS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": (">", "gt"),
    "less_than_equal": ("<=", "le"),
    "less_than": ("<", "lt"),
}


def problems(error: ValidationError, known: Lines) -> list[str]:
    """One line per problem, in the order of the recipe."""
    errors: list[dict[str, Any]] = [dict(found) for found in error.errors(include_url=False)]
    said = [_said(found) + _where(found, known) for found in errors if not _echoes(found, errors)]
    return list(dict.fromkeys(said))


def _where(found: Mapping[str, Any], known: Lines) -> str:
    """The line of the value, or of what it would stand in; nothing where the recipe is not a file."""
    path = tuple(_walk(found["loc"])[0])
    lines = (known.get(path[:length]) for length in range(len(path), 0, -1))
    line = next((line for line in lines if line is not None), None)
    return "" if line is None else f" (line {line})"


def _echoes(found: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    """A list whose items were refused is also called too short."""
    place = found["loc"]
    inside = any(len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in others)
    return found["type"] == "too_short" and inside


def _said(found: dict[str, Any]) -> str:
    location, section = _walk(found["loc"])
    path = ".".join(location)
    kind, said, value = found["type"], found["msg"], found.get("input")
    if kind == "extra_forbidden":
        return f"{path}: unknown key; {_suggest(location[-1], section)}"
    if kind == "missing":
        return f"{path}: required, but not there"
    if kind == "value_error":
        text = said.removeprefix("Value error, ")
        # A section's own check already names the key below the section.
        inner = text.split(":", 1)[0]
        known = section.model_fields if section is not None else {}
        if inner.split(".", 1)[0] in known and inner == inner.strip() and " " not in inner:
            return f"{path}.{text}" if path else text
        return f"{path}: {text}" if path else text
    if kind == "literal_error":
        words = [w.strip(" '") for w in found["ctx"]["expected"].replace(" or ", ", ").split(",")]
        close = nearest(value, words)
        hint = f"; did you mean {close!r}?" if close else ""
        return f"{path}: expected one of {', '.join(words)}, found {value!r}{hint}"
    noun = _NOUNS.get(kind.split("_", 1)[0])
    if noun is not None and kind.endswith(("_type", "_parsing", "_from_float")):
        return f"{path or 'the recipe'}: expected {noun}, found {_short(value)}"
    if kind in _LIMITS:
        sign, name = _LIMITS[kind]
        return f"{path}: expected a value {sign} {found['ctx'][name]:g}, found {value!r}"
    return f"{path}: {said[:1].lower()}{said[1:]}, found {_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"a mapping with {', '.join(map(str, list(value)[:4]))}" if value else "an empty mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _walk(loc: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel] | None]:
    """The path as written in the recipe, without pydantic's own union tags, and the section it is in."""
    path: list[str] = []
    section: type[BaseModel] | None = Recipe
    inside: type[BaseModel] | None = Recipe
    named = False  # whether the step before was a mapping from names to sections
    for step in loc:
        inside = section
        if named and step != "[key]":
            path.append(str(step))
            named = False
            continue
        if step == "[key]":
            continue
        if (
            section is not None
            and isinstance(step, str)
            and step not in section.model_fields
            and step != loc[-1]
        ):
            continue
        if (
            section is None
            and isinstance(step, str)
            and (step[:1].isupper() or step in _NOUNS or "[" in step or step in ("str", "int", "float"))
        ):
            continue
        path.append(str(step))
        field = section.model_fields.get(str(step)) if section is not None else None
        section = model_in(field.annotation) if field is not None else None
        named = field is not None and typing.get_origin(field.annotation) is dict and section is not None
    return path, (section if section is not None else inside)


def model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, dict):
        for part in typing.get_args(annotation):
            found = model_in(part)
            if found is not None:
                return found
    return None


def _suggest(key: str, section: type[BaseModel] | None) -> str:
    known = list(section.model_fields) if section is not None else []
    close = nearest(key, known)
    if close is not None:
        return f"did you mean {close}?"
    if section is not None and (usual := _USUAL.get(key)) in known:
        return f"did you mean {usual}?"
    for name, field in sorted(Recipe.model_fields.items(), key=lambda item: item[0] != "output"):
        other = model_in(field.annotation)
        if other is not None and key in other.model_fields:
            return f"did you mean {name}.{key}?"
    return f"known here: {', '.join(known)}"
