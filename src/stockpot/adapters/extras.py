"""Third-party libraries are optional: this is the one place that says which extra brings them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
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


def need(module: str) -> Any:
    """The imported module, or an error that names the extra to install."""
    library = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == library
        raise TaskError(
            describe(
                f"library {library}",
                expected="an installed one, because the recipe names it",
                found="none" if missing else f"one that does not load ({error})",
                fix=f"pip install 'stockpot[{EXTRAS[library]}]'",
            )
        ) from error


def look_at(listing: str, name: str, known: Iterable[str]) -> str:
    """The fix for an unknown model name: the nearest ones, and where all of them are."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"try {', '.join(close)}; all are in {listing}" if close else f"look at {listing}"
