"""Models by name: each library in its own file, each with its own preprocessing."""

from stockpot.adapters.models.load import load_model

__all__ = ["load_model"]
