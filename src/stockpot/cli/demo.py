"""`stockpot demo`: real soups on embedded data."""

from __future__ import annotations

from stockpot.cli.failures import resumable
from stockpot.cli.options import Json


@resumable
def demo(as_json: Json = False) -> None:
    """Make real soups."""
    raise NotImplementedError
