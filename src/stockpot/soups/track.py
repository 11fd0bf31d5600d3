"""One of the coefficient sets that are learned side by side, and how long each learns."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from stockpot.soups.setbacks import Setbacks
from stockpot.soups.settings_before import Settings
from stockpot.task import Data


@dataclass
class Track:
    """One set of coefficients and the data it learns from."""

    number: int
    data: Data
    held_out: Data | None = None  # early stopping; None: keep the last coefficients
    start: tuple[int, ...] | None = None  # begin at the mean of these ingredients; None: of all
    raw: Tensor = field(init=False)  # (K, G) what the optimiser moves
    theta: Tensor = field(init=False)  # (P,) the track's soup
    W: Tensor = field(init=False)  # (K, G) its mixing weights, float64
    temperature: float | None = None
    held_out_loss: float = float("inf")
    setbacks: Setbacks = field(default_factory=Setbacks)


def steps_for(settings: Settings, samples: int) -> int:
    """J, given or as epochs of the data."""
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    return max(1, round(settings.epochs * samples / min(settings.batch_size, samples)))
