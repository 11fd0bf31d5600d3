"""Where learning sets out: from the mean of all models, or from a greedy soup.

A fold's `own-greedy` soup is chosen without the samples it leaves out. `greedy` is the soup of all fitting data: one
search for all folds instead of one for each, and a soup chosen on more; but the samples a fold leaves out, which say
when it stops, had a say in where it began.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stockpot.engine import Live
from stockpot.soups.greedy import greedy
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.settings_before import Settings
from stockpot.soups.state import StateStore

# Samples from which running statistics are estimated for a candidate of a fold's own start. All of them, for every
# candidate of every fold, would take most of the time that a network with BatchNorm learns. No soup that is returned is
# chosen like that.
CALIBRATION = 1024

Start = tuple[int, ...] | None  # the mean of these ingredients; None: of all


def find(
    kitchen: Kitchen,
    live: Live,
    settings: Settings,
    parts: Sequence[Tensor | None],
    store: StateStore | None,
) -> list[Start]:
    """One for each part of the fitting data (None: all of it), or as an earlier process found them."""
    saved = None if store is None else store.load()
    if saved is not None:
        return [None if start is None else tuple(start) for start in saved[1]["starts"]]
    match settings.start:
        case "mean":
            return [None] * len(parts)
        case "greedy":
            return [greedy_members(kitchen, live, settings, None, "greedy soup")] * len(parts)
        case "own-greedy":
            return [
                greedy_members(
                    kitchen, live, settings, part, f"greedy soup{_which(part, fold, len(parts))}", CALIBRATION
                )
                for fold, part in enumerate(parts)
            ]


def _which(part: Tensor | None, fold: int, folds: int) -> str:
    return "" if part is None else f", fold {fold + 1} of {folds}"


def greedy_members(
    kitchen: Kitchen,
    live: Live,
    settings: Settings,
    indices: Tensor | None,
    label: str,
    calibration: int | None = None,
) -> tuple[int, ...]:
    """Of the greedy soup of all fitting data, or of a part."""
    return greedy(
        kitchen, live,
        indices=indices, ties=settings.greedy_ties, by_content=True, calibration=calibration, label=label,
    ).chosen  # fmt: skip
