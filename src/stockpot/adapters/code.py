"""`module:function` of the user, the only code a recipe can run."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from stockpot.errors import TaskError, describe


def load_code(reference: str, folder: Path) -> Callable[..., Any]:
    """The function, from a module beside the recipe or else from any installed one."""
    name, _, attribute = reference.partition(":")
    module = _module(name, folder, reference)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        known = ", ".join(k for k, v in vars(module).items() if callable(v) and not k.startswith("_"))
        raise TaskError(
            describe(
                f"python: {reference}",
                expected=f"a function {attribute} in {module.__file__}",
                found=f"functions {known}" if known else "no functions there",
                fix="correct the name after the colon",
            )
        )
    return found  # type: ignore[no-any-return]


def call_code(reference: str, folder: Path, *args: Any, **options: Any) -> Any:
    """Call the user's function; what goes wrong inside it is said to be theirs."""
    function = load_code(reference, folder)
    try:
        return function(*args, **options)
    except Exception as error:
        raise TaskError(
            describe(
                f"python: {reference}",
                expected="a function that returns",
                found=f"{type(error).__name__}: {error}",
                fix="correct the function or the options it is given",
            )
        ) from error


def code_digest(reference: str, folder: Path) -> tuple[str, str] | None:
    """Name and digest of the file beside the recipe that has the function; None for an installed module.

    Of what the file does: comments and blank lines may change. What it imports in turn is not looked at.
    """
    file = _file(reference.partition(":")[0], folder)
    if file is None:
        return None
    source = file.read_bytes()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # which importing will say better
        source = ast.unparse(ast.parse(source)).encode()
    return file.relative_to(folder).as_posix(), hashlib.sha256(source).hexdigest()


def _file(name: str, folder: Path) -> Path | None:
    if name.partition(".")[0] == "stockpot":  # ours, whatever lies beside the recipe
        return None
    stem = folder.joinpath(*name.split("."))
    return next((f for f in (stem.with_suffix(".py"), stem / "__init__.py") if f.is_file()), None)


def _module(name: str, folder: Path, reference: str) -> ModuleType:
    file = _file(name, folder)
    try:
        if file is None:
            return import_module(name)
        # As `python script.py` does: files beside the recipe may import each other, also later.
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        loaded = sys.modules.get(name)
        if loaded is None:
            loaded = import_module(name)
        if loaded.__file__ is not None and Path(loaded.__file__).resolve() == file.resolve():
            return loaded
        return _private(name, file)  # a module of another recipe or library has the same name
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            found, fix = ("no such module", f"write {name.replace('.', '/')}.py beside the recipe, or install it")
        else:
            found, fix = f"{type(error).__name__}: {error}", "correct the module"
        raise TaskError(describe(f"python: {reference}", expected=f"a module {name}", found=found, fix=fix)) from error


def _private(name: str, file: Path) -> ModuleType:
    key = f"_stockpot_{abs(hash(str(file.resolve()))):x}_{name.replace('.', '_')}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module
