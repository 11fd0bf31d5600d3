"""From a file and `--set` overrides to a checked recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stockpot.errors import RecipeError
from stockpot.recipe.problems import problems
from stockpot.recipe.schema import Recipe
from stockpot.recipe.yaml_text import parse
from stockpot.small_files import read_text

_MOST = 2**20  # bytes; a recipe has fifteen lines


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Overrides are `section.key=value` with YAML values, applied before anything is checked."""
    file = Path(path)
    try:
        text = read_text(file, _MOST)
    except FileNotFoundError as error:
        raise RecipeError(f"{file}: there is no such recipe") from error
    except IsADirectoryError as error:
        raise RecipeError(f"{file}: a folder; give the recipe file itself") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not a text file, so not a recipe") from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"{file}: cannot be read: {error}") from error
    content = parse(text, str(file))
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise RecipeError(f"{file}: expected sections such as pool, model and data, found {found}")
    return make_recipe(content, file.parent, overrides, str(file))


def make_recipe(
    content: Mapping[str, Any], folder: str | Path, overrides: Iterable[str] = (), where: str = "recipe"
) -> Recipe:
    """A recipe from plain values, as if it were written in a file in `folder`."""
    merged = dict(content)
    for override in overrides:
        merged = _override(merged, override)
    try:
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        lines = problems(error)
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise RecipeError(f"{where}: {count}\n" + "\n".join(f"  {line}" for line in lines)) from error
    home = Path(folder).resolve()
    recipe._folder = home if recipe.base is None else (home / Path(recipe.base).expanduser()).resolve()
    return recipe


def _override(content: dict[str, Any], override: str) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {override}: expected key=value, such as method.lr=0.02")
    return _put(content, keys, parse(text, f"--set {override}"), override)


def _put(content: dict[str, Any], keys: list[str], value: Any, override: str) -> dict[str, Any]:
    head, *rest = keys
    if not rest:
        return {**content, head: value}
    inner = content.get(head)
    if inner is None:
        inner = {}
    if not isinstance(inner, dict):
        raise RecipeError(f"--set {override}: {head} is {inner!r}, which has no keys below it")
    return {**content, head: _put(inner, rest, value, override)}
