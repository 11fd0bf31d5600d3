"""Steps that cannot be taken, and when to stop hoping that the next one can.

A step whose loss or gradient is not finite is skipped. When that happens too often, the track goes back to its best
coefficients and learns on at half the rate; after a few halvings it gives up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

IN_A_ROW = 10  # steps skipped one after the other
SHARE = 0.05  # of the steps since the visit began or last went back, once so many were skipped
HALVINGS = 3  # of the rate, on one track


@dataclass
class Setbacks:
    """What one track has met. Whole numbers only, so that a state can hold them exactly."""

    skipped: int = 0  # steps in all visits
    halvings: int = 0  # in all visits: once lowered, the rate stays low
    visit: int = 0  # steps skipped in this visit
    row: int = 0  # those among them without a good one since
    lately: int = 0  # steps skipped since the visit began or last went back
    steps: int = 0  # taken or skipped since then

    @property
    def factor(self) -> float:
        """On the learning rate."""
        return 0.5**self.halvings

    def begin_visit(self) -> None:
        self.visit = self.row = self.lately = self.steps = 0

    def count(self, skipped: bool) -> bool:
        """One more step; whether the limit is reached."""
        self.steps += 1
        if not skipped:
            self.row = 0
            return False
        self.skipped += 1
        self.visit += 1
        self.row += 1
        self.lately += 1
        return self.row >= IN_A_ROW or (self.lately >= IN_A_ROW and self.lately > SHARE * self.steps)

    def go_back(self) -> bool:
        """Halve the rate; False when it was halved often enough."""
        if self.halvings == HALVINGS:
            return False
        self.halvings += 1
        self.row = self.lately = self.steps = 0
        return True

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Setbacks:
        return cls(**{name: int(count) for name, count in value.items()})


def notes(tracks: Sequence[Setbacks], steps: int) -> tuple[str, ...]:
    """For the result, given all tracks and their steps in all."""
    found = []
    skipped = sum(track.skipped for track in tracks)
    if skipped:
        found.append(f"{skipped} of {steps} steps were skipped: their loss or gradient was not finite")
    for number, track in enumerate(tracks, start=1):
        if track.halvings:
            fold = f"fold {number} " if len(tracks) > 1 else "learning "
            times = f"{track.halvings} time{'s' if track.halvings > 1 else ''}"
            found.append(
                f"{fold}went back to its best coefficients {times}, and on at {track.factor:g} of the learning rate"
            )
    return tuple(found)
