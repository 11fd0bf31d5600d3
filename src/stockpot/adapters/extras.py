"""Third-party libraries: which extra brings each of them, how they are asked to be silent, and how they are refused."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from stockpot.errors import TaskError

EXTRAS = {
    "transformers": "transformers", "timm": "vision", "torchvision": "vision", "PIL": "images", "open_clip": "clip",
    "pyarrow": "tables", "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb",
    "lm_eval": "lm-eval",
    "lightning": "lightning", "pytorch_lightning": "lightning",
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
        expected = "an installed one"
        found = "none" if missing else f"one that does not load ({error})"
        raise bad_model(f"library {library}", expected, found, f"pip install 'stockpot[{EXTRAS[library]}]'") from error


def unknown_model(library: str, name: str, listing: str, known: Iterable[str]) -> TaskError:
    """The error for a name that the installed library does not have; it suggests the nearest ones."""
    close = difflib.get_close_matches(name, list(known), n=3)
    fix = f"try {', '.join(close)}; all are in {listing}" if close else f"look at {listing}"
    return bad_model(f"model.{library} {name!r}", f"a model name of the installed {library}", "an unknown one", fix)


@contextmanager
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
