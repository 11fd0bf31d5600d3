"""The ways to decide mixing weights. Settings are read without torch; the rest is loaded when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stockpot.soups.settings_before import LEARNED, METHODS, PRESETS, Settings, settings_for

if TYPE_CHECKING:
    from stockpot.soups.cooking import compare, cook
    from stockpot.soups.result import Result
    from stockpot.soups.state import StateStore

__all__ = [
    "LEARNED",
    "METHODS",
    "PRESETS",
    "Result",
    "Settings",
    "StateStore",
    "compare",
    "cook",
    "settings_for",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    homes = {"compare": "cooking", "cook": "cooking", "Result": "result", "StateStore": "state"}
    if name in homes:
        return getattr(import_module(f"stockpot.soups.{homes[name]}"), name)
    raise AttributeError(f"module 'stockpot.soups' has no attribute {name!r}")
