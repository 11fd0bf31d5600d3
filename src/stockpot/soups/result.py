"""What cooking gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stockpot.soup import Soup
from stockpot.soups.settings import Settings
from stockpot.task import Scores
from stockpot.task.scores import worded


@dataclass(frozen=True, eq=False)
class Result:
    """A cooked soup, how it scores, what it cost, and every decision on the way."""

    method: str
    settings: Settings
    soup: Soup | None  # None for the ensemble, which is no soup
    fit: Scores | None  # on the data the soup was made with
    # Each sample scored by coefficients that were not fitted on it (folds). A little too good: when to stop was chosen
    # on the same samples.
    held_out: Scores | None = None
    report: Scores | None = None  # on the report data, touched once
    history: tuple[Mapping[str, Any], ...] = ()  # decisions, steps and evaluations, in order
    models_used: int = 0
    seconds: float = 0.0
    peak_host: int = 0  # bytes, without file-backed pages
    peak_device: int = 0  # bytes
    notes: tuple[str, ...] = ()

    @property
    def score(self) -> Scores:
        """The most honest score there is: report data, else held-out, else the fitting data."""
        best = self.report or self.held_out or self.fit
        assert best is not None
        return best

    def __str__(self) -> str:
        where = "report" if self.report else "held-out" if self.held_out else "fitting"
        models = f"{self.models_used} model{'s' if self.models_used != 1 else ''}"
        line = f"{self.method}: {worded(self.score)} on {where} data, {models}, {self.seconds:.1f} s"
        return "\n".join([line, *(f"  {note}" for note in self.notes)])
