"""The order people expect of names with numbers: `model_2` before `model_10`."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(text: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Runs of digits compare as numbers, and before letters; the text itself breaks ties ("01", "1")."""
    parts = (part for part in _DIGITS.split(text) if part)
    return tuple((0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts), text
