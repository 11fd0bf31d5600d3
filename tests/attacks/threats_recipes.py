"""Recipes of strangers. `python:` is the one key that runs code, and says so."""

from __future__ import annotations

import os
from pathlib import Path

from attacks.kit import Threat, marker_in, threat

RECIPES: list[Threat] = []


def _recipe(folder: Path, content: str) -> Path:
    (folder / "recipe.yaml").write_text(content)
    return folder / "recipe.yaml"


for _name, _text, _words in (
    (
        "yaml: a tag that calls os.system",
        "a: !!python/object/apply:os.system ['touch {marker}']",
        "could not determine",
    ),
    ("yaml: a tag that makes an object", "a: !!python/object/new:os.system ['touch {marker}']", "could not determine"),
    ("yaml: a tag that names a function", "a: !!python/name:os.system", "could not determine"),
    ("yaml: a tag that imports a module", "a: !!python/module:antigravity", "could not determine"),
    ("yaml: an alias that contains itself", "a: &a [*a]", "contains it"),
    ("yaml: an alias that contains itself as key", "a: &a {{*a : 1}}", "contains it"),
    ("yaml: one key twice", "pool: {{path: a}}\npool: {{path: b}}", "appears twice"),
    ("yaml: nested twenty thousand deep", "a: " + "[" * 20_000, "not valid YAML"),
    ("yaml: a number of a million digits", "a: " + "9" * 900_000, "not valid YAML"),
    ("yaml: NUL", "a: \0", "not valid YAML"),
):

    def _make(folder: Path, content: str = _text) -> Path:
        return _recipe(folder, content.format(marker=marker_in(folder)))

    RECIPES.append(Threat(_name, _make, _words))


@threat("yaml: nine lines of aliases for a billion values", "more than 100,000 values", RECIPES)
def laughs(folder: Path) -> Path:
    lines = ["a0: &a0 [lol]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 10)]
    return _recipe(folder, "\n".join(lines))


@threat("yaml: merged aliases for a billion keys", "more than 100,000 values", RECIPES)
def merged_laughs(folder: Path) -> Path:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 10)}]}}" for k in range(1, 10)]
    return _recipe(folder, "\n".join(lines))


@threat("recipe: two megabytes", "more than such a file has", RECIPES)
def large(folder: Path) -> Path:
    return _recipe(folder, "#" * 2**21)


@threat("recipe: a device without an end", "not a regular file", RECIPES)
def endless(folder: Path) -> Path:
    (folder / "recipe.yaml").symlink_to("/dev/zero")
    return folder / "recipe.yaml"


@threat("recipe: a FIFO", "not a regular file", RECIPES)
def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "recipe.yaml")
    return folder / "recipe.yaml"
