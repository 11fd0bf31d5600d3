"""The order people expect of names with numbers: `model_2` before `model_10`."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(text: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Runs of digits compare as numbers, and before letters; the text itself breaks ties ("01", "1").

    Numbers compare by length and then as text, because `int` refuses the thousands of digits that a hostile
    file may put in a name.
    """
    return tuple(_part(part) for part in _DIGITS.split(text) if part), text


def _part(part: str) -> tuple[int, int, str]:
    if part[0] in "0123456789":
        digits = part.lstrip("0")
        return 0, len(digits), digits
    return 1, 0, part
