"""Third-party libraries: which extra brings each of them, how they are asked to be silent, and how they are refused."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from stockpot.errors import TaskError, describe

EXTRAS = {
    "transformers": "transformers",
    "timm": "vision",
    "torchvision": "vision",
    "PIL": "images",
    "open_clip": "clip",
    "pyarrow": "tables",
    "tensorboard": "tensorboard",
}


def bad_model(what: str, expected: str, found: str, fix: str) -> TaskError:
    return TaskError(describe(what, expected=expected, found=found, fix=fix))


def need(module: str) -> Any:
    """The imported module, or an error that names the extra to install."""
    library = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == library
        raise bad_model(
            f"library {library}",
            "an installed one, because the recipe names it",
            "none" if missing else f"one that does not load ({error})",
            f"pip install 'stockpot[{EXTRAS[library]}]'",
        ) from error


def unknown_model(key: str, name: str, listing: str, known: Iterable[str]) -> TaskError:
    """The error for a name that the installed library does not have; it suggests the nearest ones."""
    close = difflib.get_close_matches(name, list(known), n=3)
    fix = f"try {', '.join(close)}; all are in {listing}" if close else f"look at {listing}"
    library = key.removeprefix("model.")
    return bad_model(f"{key} {name!r}", f"a model name of the installed {library}", "an unknown one", fix)


@contextmanager
def no_log() -> Iterator[None]:
    """Nobody logs anything below errors: what matters comes back as errors of ours."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def no_bars(log: Any) -> Iterator[None]:
    """Nobody shows progress bars either; `log` is `transformers.utils.logging`."""
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        with no_log():
            yield
    finally:
        if shown:
            log.enable_progress_bar()
