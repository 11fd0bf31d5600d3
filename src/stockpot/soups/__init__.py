"""The ways to decide mixing weights. Settings and the registry are read without torch."""

from stockpot.soups.registry import LEARNED, METHODS, PRESETS, settings_for
from stockpot.soups.settings import Settings

__all__ = ["LEARNED", "METHODS", "PRESETS", "Settings", "settings_for"]
