"""docs/recipe.md, made from the descriptions in the schema: `python tests/recipe/reference_page.py` writes it."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stockpot.recipe.load import model_in
from stockpot.recipe.schema import Finetune, ListedTrial, MethodSettings, Recipe
from stockpot.recipe.values import LmEval, PythonCode, Split
from stockpot.zoo.plan import SPACES

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"
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

_HEADER = f"""\
# Recipe reference

<!-- Written by tests/recipe/reference_page.py from the descriptions in src/stockpot/recipe; edit them there. -->

A recipe is a YAML file. Paths are relative to the file. Unknown keys are refused. Any value can be replaced on
the command line with `--set section.key=value`. A recipe runs code only where it says `python:`.

```yaml
{EXAMPLE}```
"""


def recipe_reference() -> str:
    """The whole reference as Markdown."""
    parts = [_HEADER, _table("Top level", Recipe)]
    for name, field in Recipe.model_fields.items():
        section = model_in(field.annotation)
        if section is not None:
            parts.append(_table(f"`{name}`", section))
            for inner, inner_field in section.model_fields.items():
                below = model_in(inner_field.annotation)
                if below is not None and below not in (Split, PythonCode, MethodSettings, ListedTrial):
                    parts.append(_table(f"`{name}.{inner}`", below))
    parts.append(_table("A split: `data.train`, `data.fit`, `data.report`", Split))
    parts.append(_table("Tasks of lm-evaluation-harness: `data.report.lm_eval`", LmEval))
    return "\n".join(parts)


def _table(title: str, section: type[BaseModel]) -> str:
    said = " ".join((section.__doc__ or "").split())
    rows = [f"## {title}", "", said, "", "| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        about = " ".join((field.description or "").split()).replace("|", "\\|")
        kind = "search space" if section is Finetune and name in SPACES else _words(field.annotation)
        rows.append(f"| `{name}` | {kind} | {_default(field)} | {about} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple) and value and isinstance(value[0], float):
        return f"`[{', '.join(f'{v:g}' for v in value)}]`"
    if isinstance(value, dict) and value:
        return "`{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}`"
    if isinstance(value, (BaseModel, tuple)) or value in (None, {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _words(annotation: Any) -> str:
    """What kind of value a field takes."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(a) for a in args if a is not type(None)))
    if origin is typing.Literal:
        return ", ".join(f"`{a}`" for a in args)
    if origin is tuple:
        return "list" if args[-1] is ... else "pair"
    named = {
        Split: "split", LmEval: "tasks", str: "text", int: "whole number", float: "number",
        bool: "true or false", Any: "text or mapping",
    }  # fmt: skip
    return named.get(annotation, "mapping")


if __name__ == "__main__":
    PAGE.write_text(recipe_reference(), encoding="utf-8")
