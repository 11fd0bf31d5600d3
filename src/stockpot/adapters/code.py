"""Code of others: libraries that the extras of stockpot bring, and `module:function` of the user.

The latter is the only code that a recipe can run.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from stockpot.errors import TaskError
from stockpot.task import Metric
from stockpot.task.batches import users_code

# Libraries ----------------------------------------------------------------------------------------

EXTRAS = {
    "transformers": "transformers", "timm": "vision", "torchvision": "vision", "PIL": "images", "open_clip": "clip",
    "pyarrow": "tables", "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb",
    "lm_eval": "lm-eval",
    "lightning": "lightning", "pytorch_lightning": "lightning",
    "jinja2": "cli", "sklearn": "demo", "huggingface_hub": "transformers",
}  # fmt: skip


def bad_model(what: str, expected: str, found: str, fix: str) -> TaskError:
    return TaskError.of(what, expected=expected, found=found, fix=fix)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def need(module: str) -> Any:
    """The imported module, or an error that names the extra to install."""
    library = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == library
        expected, found = "an installed one", "none" if missing else f"one that does not load ({error})"
        raise bad_model(f"library {library}", expected, found, f"pip install 'stockpot[{EXTRAS[library]}]'") from error


def unknown_model(library: str, name: str, listing: str, known: Iterable[str]) -> TaskError:
    """The error for a name that the installed library does not have; it suggests the nearest ones."""
    close = difflib.get_close_matches(name, list(known), n=3)
    fix = f"try {', '.join(close)}; all are in {listing}" if close else f"look at {listing}"
    return bad_model(f"model.{library} {name!r}", f"a model name of the installed {library}", "an unknown one", fix)


@contextlib.contextmanager
def silent(bars: Any = None) -> Iterator[None]:
    """Nobody logs anything below errors: what matters comes back as errors of ours.

    With `transformers.utils.logging` as `bars`, no progress bars are shown either.
    """
    before, shown = logging.root.manager.disable, bars is not None and bars.is_progress_bar_enabled()
    logging.disable(max(before, logging.WARNING))
    if shown:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(before)
        if shown:
            bars.enable_progress_bar()


# The user's functions -----------------------------------------------------------------------------


def load_code(reference: str, folder: Path) -> Any:
    """The function (or the `Metric`), from a module beside the recipe or else from any installed one."""
    name, _, attribute = reference.partition(":")
    module = _module(name, folder, reference)
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found) and not isinstance(found, Metric):
        known = ", ".join(k for k, v in vars(module).items() if callable(v) and not k.startswith("_"))
        there, fix = f"functions {known}" if known else "no functions there", "correct the name after the colon"
        raise bad_model(f"python: {reference}", f"a function {attribute} in {module.__file__}", there, fix)
    return found


def call_code(reference: str, folder: Path, *args: Any, **options: Any) -> Any:
    """Call the user's function; what goes wrong inside it is said to be theirs."""
    function = load_code(reference, folder)
    with users_code(f"python: {reference}", function, *args, *options.values()):
        return function(*args, **options)


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
        # As `python script.py` does: files beside the recipe may import each other, also later.
        if file is not None and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        loaded = sys.modules.get(name) or import_module(name)
        own = file is None or (loaded.__file__ and Path(loaded.__file__).resolve() == file.resolve())
        return loaded if own or file is None else _private(name, file)
    except Exception as error:
        found, fix = said(error), "correct the module"
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            found = "no such module"
            fix = f"write {name.replace('.', '/')}.py beside the recipe, or install it"
        if name.endswith(".py"):
            found = "the name of a file"
            fix = f"write {name.removesuffix('.py').replace('/', '.')}:{reference.partition(':')[2]}"
        raise bad_model(f"python: {reference}", f"a module {name}", found, fix) from error


def _private(name: str, file: Path) -> ModuleType:
    """The module under another name, because one of another recipe or library has its own."""
    key = f"_stockpot_{abs(hash(str(file.resolve()))):x}_{name.replace('.', '_')}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[key])
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]
