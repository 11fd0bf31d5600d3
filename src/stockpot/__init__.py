"""stockpot: many fine-tuned checkpoints of one model in, a single better model out.

Names are loaded on first use, so that importing stockpot costs nothing and `stockpot --help` is quick.
"""

from __future__ import annotations

from importlib import import_module

from stockpot._version import __version__

TYPE_CHECKING = False  # as in typing, which is not imported: `python -m stockpot` would take the current folder's
if TYPE_CHECKING:
    from typing import Any

    from stockpot.cooking import Comparison, compare, cook
    from stockpot.errors import StockpotError
    from stockpot.events import Event
    from stockpot.layout import Layout
    from stockpot.pool import Pool
    from stockpot.soup import Soup
    from stockpot.soup.average import average
    from stockpot.soups import METHODS, PRESETS, Settings
    from stockpot.soups.result import Result
    from stockpot.task import Metric, Scores, Task

_HOME = {
    "METHODS": "stockpot.soups",
    "PRESETS": "stockpot.soups",
    "Comparison": "stockpot.cooking",
    "Event": "stockpot.events",
    "Layout": "stockpot.layout",
    "Metric": "stockpot.task",
    "Pool": "stockpot.pool",
    "Result": "stockpot.soups.result",
    "Scores": "stockpot.task",
    "Settings": "stockpot.soups",
    "Soup": "stockpot.soup",
    "StockpotError": "stockpot.errors",
    "Task": "stockpot.task",
    "average": "stockpot.soup.average",
    "compare": "stockpot.cooking",
    "cook": "stockpot.cooking",
}

__all__ = [
    "METHODS",
    "PRESETS",
    "Comparison",
    "Event",
    "Layout",
    "Metric",
    "Pool",
    "Result",
    "Scores",
    "Settings",
    "Soup",
    "StockpotError",
    "Task",
    "__version__",
    "average",
    "compare",
    "cook",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'stockpot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
