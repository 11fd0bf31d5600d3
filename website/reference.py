"""Reference pages made from the declarations: settings, methods, commands, Python."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import typer

import stockpot
from stockpot.cli.app import app
from stockpot.soups.registry import DEFAULT, METHODS, PRESETS
from stockpot.soups.settings import Settings, declared


def pages() -> dict[str, str]:
    """Every generated page by its name in the site."""
    return {"reference/settings.md": settings(), "reference/commands.md": commands(), "reference/python.md": python()}


def settings() -> str:
    rows = [
        _row(f"`{name}`", _values(kind), _default(getattr(Settings, name)), setting.help)
        for name, (kind, setting) in declared().items()
    ]
    methods = [
        _row(
            f"`{name}`" + (" (default)" if name == DEFAULT else ""),
            method.summary,
            ", ".join(f"`{key}: {_plain(value)}`" for key, value in method.defaults.items()),
        )
        for name, method in METHODS.items()
    ]
    presets = [_row(f"`{name}`", about) for name, about in PRESETS.items()]
    return "\n".join(
        [
            "# Settings and methods",
            "",
            "Made from the declarations in `soups/settings.py` and `soups/registry.py`. In Python these are keyword"
            " arguments of `cook` and `compare`, in a recipe keys of `method`, on the command line"
            " `--set method.lr=0.02`. Letters in brackets are the paper's symbols.",
            "",
            "## Settings",
            "",
            *_table("setting", "value", "default", "meaning"),
            *rows,
            "",
            "## Methods",
            "",
            "Which one to take: [choosing a method](../choosing.md).",
            "",
            *_table("method", "what it is", "settings that differ from the defaults above"),
            *methods,
            "",
            "## Presets",
            "",
            *_table("preset", "what it follows"),
            *presets,
            "",
        ]
    )


def commands() -> str:
    parts = [
        "# Commands",
        "",
        "What `stockpot COMMAND --help` says. Every command takes `--help`; those that give figures take `--json`.",
        "",
    ]
    command: Any
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        parts += [f"## stockpot {name}", "", inspect.cleandoc(command.help or ""), ""]
        if command.params:
            parts += [*_table("argument or option", "default", "meaning"), *map(_option, command.params), ""]
    return "\n".join(parts)


def python() -> str:
    """A section for every public name: functions first, then what they take and give."""
    names = [name for name in stockpot.__all__ if not name.startswith("_")]
    functions: list[str] = ["cook", "compare", "average"]
    objects = {name: getattr(stockpot, name) for name in names}
    functions += [n for n in names if inspect.isfunction(objects[n]) and n not in functions]
    classes = [n for n in names if inspect.isclass(objects[n])]
    mappings = [n for n in names if n not in functions and n not in classes]
    parts = [
        "# Python",
        "",
        "Everything is imported from `stockpot`, metrics of language models also from `stockpot.task`. Begin with"
        " [ten lines of Python](../../README.md#ten-lines-of-python).",
        "",
    ]
    for name in functions + classes:
        parts += [f"::: stockpot.{name}", ""]
    parts += ["## Constants", "", *_table("name", "what it is")]
    kinds = {"METHODS": "every method by name", "PRESETS": "presets of settings by name"}
    parts += [_row(f"`{name}`", kinds.get(name, "")) for name in mappings]
    return "\n".join([*parts, ""])


def _option(parameter: Any) -> str:
    name = ", ".join(f"`{opt}`" for opt in parameter.opts)
    if parameter.param_type_name == "argument":
        name = f"`{parameter.metavar or parameter.name.upper()}`"
    elif parameter.metavar:
        name += f" {parameter.metavar}"
    default = "required" if parameter.required else _default(parameter.default)
    return _row(name, default, parameter.help or "")


def _table(*titles: str) -> Iterator[str]:
    yield _row(*titles)
    yield "|" + "---|" * len(titles)


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)


def _default(value: object) -> str:
    return "" if value is None or value is False or value in ([], ()) else f"`{_plain(value)}`"


def _values(kind: Any) -> str:
    """What kind of value a setting takes, in words."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return ", ".join(dict.fromkeys(_values(part) for part in typing.get_args(kind)))
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{word}`" for word in typing.get_args(kind))
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "`none`"}
    return words.get(kind, "function")
