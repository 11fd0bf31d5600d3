"""Modules of `experiments/`, which is no package: its scripts find each other as files beside them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def script(name: str) -> Any:
    """A module of the folder itself, such as `fetch` or `convert.cifar10`."""
    if str(EXPERIMENTS) not in sys.path:
        sys.path.append(str(EXPERIMENTS))
    return importlib.import_module(name)


def part(path: str) -> Any:
    """A file of one zoo; several zoos have a `model.py`."""
    file = EXPERIMENTS / path
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").replace("-", "_"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
