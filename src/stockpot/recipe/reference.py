"""The recipe reference and the JSON schema, both made from the fields' own descriptions."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stockpot.recipe.load import parse
from stockpot.recipe.method import MethodSettings
from stockpot.recipe.problems import model_in
from stockpot.recipe.schema import Recipe
from stockpot.recipe.values import PythonCode, Space, Split

EXAMPLE = """\
pool:
  path: checkpoints/*.safetensors

model:
  transformers: base-model       # a local folder

data:
  table: reviews.csv
  text: review
  label: stars
  fit: 0.5
  report: 0.5

method:
  name: crossfit

output:
  dir: runs/reviews
"""

_HEADER = """\
# Recipe reference

<!-- Generated from the schema (`stockpot.recipe.recipe_reference`); edit the descriptions there. -->

A recipe is a YAML file. Paths are relative to the file. Unknown keys are refused. Any value can be replaced on
the command line with `--set section.key=value`. A recipe runs code only where it says `python:`.

```yaml
{example}```
"""


def json_schema() -> dict[str, Any]:
    """For editors: completion and checking while a recipe is written."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "stockpot recipe"}


def recipe_reference() -> str:
    """The whole reference as Markdown."""
    parts = [_HEADER.format(example=EXAMPLE), _table("Top level", Recipe, "")]
    for name, field in Recipe.model_fields.items():
        section = model_in(field.annotation)
        if section is not None:
            parts.append(_table(f"`{name}`", section, name))
            for inner, inner_field in section.model_fields.items():
                below = model_in(inner_field.annotation)
                if below not in (None, Split, Space, PythonCode, MethodSettings):
                    parts.append(_table(f"`{name}.{inner}`", below, f"{name}.{inner}"))
    parts.append(_table("A split: `data.train`, `data.fit`, `data.report`", Split, ""))
    parts.append(_table("A search space: `finetune.lr` and others", Space, ""))
    return "\n".join(parts)


def example() -> Any:
    return parse(EXAMPLE, "example")


def _table(title: str, section: type[BaseModel], prefix: str) -> str:
    said = " ".join((section.__doc__ or "").split())
    rows = [f"## {title}", "", said, "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        about = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_kind(field)} | {_default(field, prefix, name)} | {about} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo, prefix: str, name: str) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Space):
        given = value.model_dump(exclude_none=True)
        if value.choices is not None:
            return f"`[{', '.join(f'{v:g}' for v in value.choices)}]`"
        return "`{" + ", ".join(f"{k}: {v}" for k, v in given.items()) + "}`"
    if isinstance(value, BaseModel) or value is None or value in ({}, ()):
        return ""
    if prefix == "method" and name == "methods":
        return "all"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def _kind(field: FieldInfo) -> str:
    if model_in(field.annotation) in (Split,):
        return "split"
    if model_in(field.annotation) is Space:
        return "search space"
    return _words(field.annotation)


def _words(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        for note in args[1:]:
            words = getattr(note, "json_schema", {}) or {}
            if "enum" in words:
                return ", ".join(f"`{w}`" for w in words["enum"])
        return _words(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(a) for a in args if a is not type(None)))
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin is tuple:
        return "list" if args[-1] is ... else "pair"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(
        annotation, "text or mapping"
    )
